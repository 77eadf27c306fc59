"""Train from a recipe's ``gpu.yaml`` on a machine without an accelerator.

The model, the data, the sizes and the device are replaced by those of the recipe's small form. Everything else runs as
on a GPU machine: FSDP1, offload, LoRA, gradient checkpointing, packed sequences, dynamic batches, bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from calculator_run import Run
from from_scratch import make_model, make_tokenizer
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from verl_tool.trainer.composition import leaves

RECIPES = Path(__file__).parents[2] / "examples" / "train"
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_OF_SMALL_FORM = (
    *(
        "recipe",
        "data",
        "tool_server",
        "trainer.device",
        "ray_kwargs",
        "transfer_queue",
        "reward.num_workers",
        f"{_ROLLOUT}.agent.num_workers",
    ),
    *(f"{_ROLLOUT}.{name}" for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_model_parallel_size")),
    *(f"{_ROLLOUT}.{name}" for name in ("enforce_eager", "free_cache_engine", "enable_sleep_mode")),
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
)
_SMALL = {
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": 1,
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
    # Some samples have three rows.
    "data.train_batch_size": 2,
    "data.max_prompt_length": 1792,
    "data.max_response_length": 160,
    "actor_rollout_ref.agent.max_action_length": 24,
    "actor_rollout_ref.agent.max_obs_length": 16,
    f"{_ACTOR}.ppo_mini_batch_size": 1,
    f"{_ROLLOUT}.n": 4,
    # Else nothing is learned where all rewards are equal.
    f"{_ACTOR}.entropy_coeff": 0.01,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.total_training_steps": 2,
    "trainer.save_freq": 2,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
    "trainer.logger": ["console", "file"],
    "recipe.report": None,
    "stall_timeout": 600,
}


def gpu_configs() -> Iterator[tuple[str, str]]:
    """Return recipe and name of each config for GPUs, such as ``("acecoder", "gpu_mini")``."""
    for path in sorted(RECIPES.glob("*/gpu*.yaml")):
        yield path.parent.name, path.stem


def make_text_model(folder: Path) -> None:
    """Save a model of half a million random weights whose chat template describes tools as Qwen's does."""
    texts = [path.read_text() for path in sorted(RECIPES.glob("*/*.py"))]
    tokenizer = make_tokenizer(texts, 800, (RECIPES / "function_calling" / "chat_template.jinja").read_text())
    for part in (tokenizer, make_model(tokenizer, hidden=64, layers=2, seed=0, deviation=0.02)):
        part.save_pretrained(folder)


def gpu_run(folder: Path, recipe: str, name: str, model: Path, *overrides: str, full: tuple[str, ...] = ()) -> Run:
    """Make a training of two steps by ``RECIPES/recipe/name.yaml`` in `folder`/run. full: groups that are not those of
    the small form. `overrides` come last."""
    source = RECIPES / recipe
    small = _unresolved(source, name.replace("gpu", "cpu", 1))
    chosen: dict[str, object] = {k: v for k, v in small.items() if _is_of(k, _OF_SMALL_FORM) and not _is_of(k, full)}
    chosen |= _SMALL
    chosen["recipe.model"] = str(model)
    config = OmegaConf.create({"defaults": [name, "_self_"]})
    for key, value in chosen.items():
        OmegaConf.update(config, key, value, force_add=True)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "driven.yaml")
    return Run(
        folder / "run",
        (
            *("--config-dir", str(folder), "--config-name", "driven", f"hydra.searchpath=[file://{source}]"),
            *(f"run_dir={folder}/run", f"recipe.folder={source}", *overrides),
        ),
    )


def _unresolved(source: Path, name: str) -> dict[str, object]:
    """Return the settings of a recipe's config by dotted name, with interpolations unresolved."""
    with initialize_config_dir(str(source), version_base=None):
        return leaves(OmegaConf.to_container(compose(name), resolve=False))


def _is_of(key: str, groups: tuple[str, ...]) -> bool:
    return any(key == group or key.startswith(f"{group}.") for group in groups)
