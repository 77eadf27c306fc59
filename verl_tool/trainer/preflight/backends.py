"""Whether the engines, strategies and packages that a config names exist, and go together."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_tool.agent_workers.no_engine import NAME as NO_ENGINE
from verl_tool.trainer.preflight.parallelism import has_critic, has_reference

_ROLLOUT = "actor_rollout_ref.rollout"
ENGINES: dict[str, str | None] = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm", NO_ENGINE: None}
"""Rollout engines, and the module that each needs."""
STRATEGIES: dict[str, dict[str, str | None]] = {
    "FSDP": {"fsdp": None, "fsdp2": None, "fsdp_turbo": "fsdp_turbo"},
    "Mcore": {"megatron": "megatron.core"},
    "VeOmni": {"veomni": "veomni"},
    "TorchTitan": {"torchtitan": "torchtitan"},
    "MindSpeed": {"mindspeed": "mindspeed"},
}
"""By the name with which verl's class of a config begins: its strategies, and the module that each needs."""
MODEL_ENGINES = {
    "Mcore": "megatron",
    "VeOmni": "veomni",
    "TorchTitan": "torchtitan",
    "FSDP": "dp",
    "MindSpeed": "mindspeed",
}
CHECKPOINT_ENGINES: dict[str, str | None] = {
    "naive": None, "nccl": "cupy", "nixl": "nixl", "mooncake": "mooncake", "delta_sharded": "cupy",
    "kimi_ckpt_engine": "checkpoint_engine", "hccl": "torch_npu",
}  # fmt: skip
ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
LOGGERS = ("wandb", "swanlab", "mlflow", "clearml", "trackio", "tensorboard", "vemlp_wandb")
QUANTIZATION = ("fp8", "torchao")
_PIP = {
    "cupy": "cupy-cuda13x (of your CUDA)", "flash_attn": "flash-attn", "megatron.core": "megatron-core",
    "megatron.bridge": "megatron-bridge", "liger_kernel": "liger-kernel", "tensorrt_llm": "tensorrt-llm",
    "volcengine_ml_platform": "volcengine-ml-platform",
}  # fmt: skip


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it (its parents are)."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def check_combinations(config: DictConfig) -> Iterator[str]:
    """Names that do not exist, and settings that exclude each other."""
    part = config.actor_rollout_ref
    if OmegaConf.is_missing(part.rollout, "name"):
        yield f"{_ROLLOUT}.name is not set; set it to vllm"
        return
    name = part.rollout.name
    if name not in ENGINES and name not in RolloutReplicaRegistry._registry:
        yield f"{_ROLLOUT}.name={name!r} is unknown; known: {', '.join(sorted(set(ENGINES) - {NO_ENGINE}))}"
    for setting, group in _groups(config):
        yield from _strategy(setting, group)
    quantization = part.rollout.quantization
    if quantization is not None and quantization not in QUANTIZATION:
        yield f"{_ROLLOUT}.quantization={quantization!r} is unknown; known: {', '.join(QUANTIZATION)}, or null"
    elif quantization is not None and config.trainer.device == "cpu":
        yield f"{_ROLLOUT}.quantization={quantization} needs a GPU; leave it out with platform=cpu"
    backend = part.rollout.checkpoint_engine.backend
    if backend not in CHECKPOINT_ENGINES and part.rollout.checkpoint_engine.get("custom_backend_module") is None:
        yield (
            f"{_ROLLOUT}.checkpoint_engine.backend={backend!r} is unknown; known: {', '.join(CHECKPOINT_ENGINES)}, or "
            "one that checkpoint_engine.custom_backend_module registers"
        )


def _groups(config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    yield "actor_rollout_ref.actor", config.actor_rollout_ref.actor
    if has_reference(config):
        yield "actor_rollout_ref.ref", config.actor_rollout_ref.ref
    if has_critic(config):
        yield "critic", config.critic


def _family(group: DictConfig) -> str | None:
    kind = str(group.get("_target_", "")).rpartition(".")[2]
    return next((family for family in STRATEGIES if kind.startswith(family)), None)


def _strategy(setting: str, group: DictConfig) -> Iterator[str]:
    family = _family(group)
    if family is None or group.strategy in STRATEGIES[family]:
        return
    of_other = next((other for other, names in STRATEGIES.items() if group.strategy in names), None)
    if of_other is None:
        known = ", ".join(name for names in STRATEGIES.values() for name in names)
        yield f"{setting}.strategy={group.strategy!r} is unknown; known: {known}"
    else:
        yield (
            f"{setting}.strategy={group.strategy} with the options of {', '.join(STRATEGIES[family])}; set "
            f"model_engine={MODEL_ENGINES[of_other]}, which chooses both for actor, reference and critic"
        )


def check_packages(config: DictConfig) -> Iterator[str]:
    """Packages that the config needs and that cannot be imported in this environment."""
    for setting, module in _needs(config):
        if not is_installed(module):
            yield (
                f"{setting} needs the Python package {module}, which is not installed; install it (pip install "
                f"{_PIP.get(module, module.partition('.')[0])}) on all nodes, or choose another"
            )


def _needs(config: DictConfig) -> Iterator[tuple[str, str]]:
    part = config.actor_rollout_ref
    if module := ENGINES.get(part.rollout.name):
        yield f"{_ROLLOUT}.name={part.rollout.name}", module
    for setting, group in _groups(config):
        if module := STRATEGIES.get(_family(group) or "", {}).get(group.strategy):
            yield f"{setting}.strategy={group.strategy}", module
        if _family(group) == "Mcore":
            vanilla = group.megatron.vanilla_mbridge
            yield f"{setting}.megatron.vanilla_mbridge={vanilla}", "mbridge" if vanilla else "megatron.bridge"
        implementation = OmegaConf.select(group, "optim.optimizer_impl")
        if implementation and setting != "actor_rollout_ref.ref":
            yield f"{setting}.optim.optimizer_impl={implementation}", implementation.partition(".")[0]
    models = [("actor_rollout_ref.model", part.model)]
    if has_critic(config):
        models.append(("critic.model", config.critic.model))
    for setting, model in models:
        attention = OmegaConf.select(model, "override_config.attn_implementation")
        if attention in ATTENTION:
            yield f"{setting}.override_config.attn_implementation={attention}", ATTENTION[attention]
        if model.get("use_liger"):
            yield f"{setting}.use_liger=true", "liger_kernel"
    engine = part.rollout.checkpoint_engine
    separate = config.trainer.use_v1 and config.trainer.v1.trainer_mode == "separate_async"
    if separate and engine.get("custom_backend_module") is None and (module := CHECKPOINT_ENGINES.get(engine.backend)):
        yield f"{_ROLLOUT}.checkpoint_engine.backend={engine.backend}", module
    if part.rollout.quantization == "torchao":
        yield f"{_ROLLOUT}.quantization=torchao", "torchao"
    loggers = config.trainer.logger
    for logger in [loggers] if isinstance(loggers, str) else loggers or ():
        if logger in LOGGERS:
            yield f"trainer.logger={logger} (LOGGER)", logger if logger != "vemlp_wandb" else "volcengine_ml_platform"
