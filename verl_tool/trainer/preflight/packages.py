"""Whether the packages that a config needs are installed. `backends` checks what engines can do."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from verl_tool.trainer.preflight.parallelism import has_critic, has_reference

_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class CheckpointEngine:
    """How verl carries weights from the trainer to a rollout engine."""

    package: str | None = None
    """What it imports, if it is no part of verl's own requirements."""
    between: str | None = None
    """The device between whose processes it carries weights; None: within one process."""
    rollouts: tuple[str, ...] = ("vllm", "sglang")
    """The engines that can read them."""


CHECKPOINT_ENGINES = {
    "naive": CheckpointEngine(),
    "gloo": CheckpointEngine(between="cpu", rollouts=("vllm",)),
    "nccl": CheckpointEngine("cupy", "cuda"),
    "nixl": CheckpointEngine("nixl", "cuda"),
    "kimi_ckpt_engine": CheckpointEngine("checkpoint_engine", "cuda"),
    "mooncake": CheckpointEngine("mooncake", "cuda"),
    "delta_sharded": CheckpointEngine("cupy", "cuda", rollouts=("sglang",)),
}
"""Those of verl 0.9.0 and 0.9.1, and ours for a CPU (`verl_tool.agent_workers.gloo_checkpoint_engine`)."""
LOGGERS = ("wandb", "swanlab", "mlflow", "clearml", "trackio", "tensorboard", "vemlp_wandb")
_PIP = {
    "cupy": "cupy-cuda13x (of your CUDA)", "megatron.core": "megatron-core",
    "megatron.bridge": "megatron-bridge", "liger_kernel": "liger-kernel",
    "volcengine_ml_platform": "volcengine-ml-platform",
}  # fmt: skip


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it (its parents are)."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _groups(config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    yield "actor_rollout_ref.actor", config.actor_rollout_ref.actor
    if has_reference(config):
        yield "actor_rollout_ref.ref", config.actor_rollout_ref.ref
    if has_critic(config):
        yield "critic", config.critic


def check_packages(config: DictConfig) -> Iterator[str]:
    """Packages that the config needs and that cannot be imported in this environment."""
    for setting, module in _needs(config):
        if not is_installed(module):
            yield (
                f"{setting} needs the Python package {module}, which is not installed; install it (uv pip install "
                f"{_PIP.get(module, module.partition('.')[0])}) on all nodes, or choose another"
            )


def _needs(config: DictConfig) -> Iterator[tuple[str, str]]:
    part = config.actor_rollout_ref
    if part.rollout.name == "vllm":
        yield f"{_ROLLOUT}.name=vllm", "vllm"
    for setting, group in _groups(config):
        if group.strategy == "megatron":
            yield f"{setting}.strategy=megatron", "megatron.core"
            if group.megatron.use_mbridge:
                vanilla = group.megatron.vanilla_mbridge
                yield f"{setting}.megatron.vanilla_mbridge={vanilla}", "mbridge" if vanilla else "megatron.bridge"
        implementation = OmegaConf.select(group, "optim.optimizer_impl")
        if implementation and setting != "actor_rollout_ref.ref":
            yield f"{setting}.optim.optimizer_impl={implementation}", implementation.partition(".")[0]
    models = [("actor_rollout_ref.model", part.model)]
    if has_critic(config):
        models.append(("critic.model", config.critic.model))
    for setting, model in models:
        if model.get("use_liger"):
            yield f"{setting}.use_liger=true", "liger_kernel"
    engine = part.rollout.checkpoint_engine
    separate = config.trainer.use_v1 and config.trainer.v1.trainer_mode == "separate_async"
    known = CHECKPOINT_ENGINES.get(engine.backend)
    if separate and engine.get("custom_backend_module") is None and known is not None and known.package is not None:
        yield f"{_ROLLOUT}.checkpoint_engine.backend={engine.backend}", known.package
    if part.rollout.quantization == "torchao":
        yield f"{_ROLLOUT}.quantization=torchao", "torchao"
    loggers = config.trainer.logger
    for logger in [loggers] if isinstance(loggers, str) else loggers or ():
        if logger in LOGGERS:
            yield f"trainer.logger={logger} (LOGGER)", logger if logger != "vemlp_wandb" else "volcengine_ml_platform"
