"""The attention of the trained models: flash attention where it can be imported, PyTorch's own elsewhere.

verl asks for flash attention unless a config names another one, and packs the sequences of a micro-batch into one
(``use_remove_padding``). Without flash attention, transformers keeps packed sequences apart by a mask that it makes of
their positions. `PACKABLE` lists the models for which that was checked; all others are padded. Written for verl 0.9.0
and 0.9.1 and transformers 5.10.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tool.errors import ConfigError

log = logging.getLogger(__name__)

PACKABLE = frozenset(
    (
        *("gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "olmo2", "phi3"),
        *("qwen2", "qwen3", "qwen3_moe", "qwen3_vl", "smollm3"),
    )
)
"""Model types whose log-probabilities and gradients are the same packed and alone with ``sdpa``, as
``tests/platforms/test_attention.py`` measures. Not Qwen2-VL, Qwen2.5-VL, GLM-4V and Kimi-VL: verl gives those an
attention of its own for packed sequences, which is flash attention."""
_MODULES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}
_ACTOR = ("actor_rollout_ref.model", ("actor_rollout_ref.actor", "actor_rollout_ref.ref"))
_CRITIC = ("critic.model", ("critic",))


def import_problem(module: str) -> str | None:
    """Why a package of flash attention is of no use in this environment; None if it can be imported."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:  # missing, or built for another torch
        return f"{module} cannot be imported ({error})"
    return None


def choose_attention(
    config: DictConfig,
    model_type: str | None,
    *,
    critic: bool,
    find_problem: Callable[[str], str | None] = import_problem,
) -> None:
    """Set the attention of actor, reference and critic where the config leaves it to verl, and whether they pack
    sequences. May be called again when more is known.

    `model_type`: as in the ``config.json`` of the trained model; None if that is not there yet. `critic`: whether there
    is one. `find_problem`: `import_problem` where the training runs. Raises ConfigError for flash attention that is
    asked for and cannot be used, and for sequence parallelism without flash attention.
    """
    for model, users in (_ACTOR, _CRITIC) if critic else (_ACTOR,):
        strategies = {OmegaConf.select(config, f"{user}.strategy") for user in users}
        if not strategies & {"fsdp", "fsdp2"}:
            continue
        attention = _chosen(config, f"{model}.override_config", find_problem)
        if attention in _MODULES:
            continue
        for setting, size in _sequence_parallel(config, users):
            raise ConfigError(
                f"{setting}={size} with {model}.override_config.attn_implementation={attention}: verl splits sequences "
                f"over GPUs for flash attention only; set it to 1, or install flash_attn ({_HOW})"
            )
        if model_type not in (None, *PACKABLE) and OmegaConf.select(config, f"{model}.use_remove_padding"):
            OmegaConf.update(config, f"{model}.use_remove_padding", False, force_add=True)
            log.warning(
                "%s.use_remove_padding=false: packed sequences of a %s are known to be kept apart by flash attention "
                "only, and the attention is %s; sequences are padded",
                *(model, model_type, attention),
            )


_HOW = "see assets/docs/training.md#attention"


def _chosen(config: DictConfig, group: str, find_problem: Callable[[str], str | None]) -> str:
    """The attention in force. Raises ConfigError."""
    named = OmegaConf.select(config, f"{group}.attn_implementation")
    chosen = str(named or "flash_attention_2")
    problem = _why_not(chosen, config.trainer.device, find_problem)
    if problem is None:
        return chosen
    if named is not None:
        raise ConfigError(
            f"{group}.attn_implementation={named}, and {problem}; leave it out or set it to sdpa, or install the "
            f"package ({_HOW})"
        )
    with open_dict(config):
        OmegaConf.update(config, f"{group}.attn_implementation", "sdpa", force_add=True)
    if config.trainer.device != "cpu":
        log.warning("%s.attn_implementation=sdpa: %s", group, problem)
    return "sdpa"


def _why_not(attention: str, device: str, find_problem: Callable[[str], str | None]) -> str | None:
    """Why an implementation of transformers cannot be used; None if it can."""
    module = _MODULES.get(attention)
    if module is None:
        return None
    return "flash attention does not run on a CPU" if device == "cpu" else find_problem(module)


def _sequence_parallel(config: DictConfig, users: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for user in users:
        for group in (user, f"{user}.fsdp_config", f"{user}.fsdp"):
            setting = f"{group}.ulysses_sequence_parallel_size"
            size = OmegaConf.select(config, setting)
            if size is not None and size > 1:
                yield setting, size
