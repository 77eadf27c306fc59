"""What the asynchronous modes of verl's newer trainer need of a config (``trainer.v1.trainer_mode``).

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_reward_model

from verl_tool.errors import ConfigError
from verl_tool.trainer.preflight.packages import CHECKPOINT_ENGINES
from verl_tool.trainer.preflight.parallelism import replica_size

SYNC, _, SEPARATE = MODES = ("sync", "colocate_async", "separate_async")
_V1, _ROLLOUT = "trainer.v1", "actor_rollout_ref.rollout"
_BACKEND = f"{_ROLLOUT}.checkpoint_engine.backend"


def check_sampling_mode(config: DictConfig) -> None:
    """Raise ConfigError for the first setting that cannot hold in the mode, with its name and what to do."""
    for problem in _problems(config):
        raise ConfigError(problem)


def _problems(config: DictConfig) -> Iterator[str]:
    mode = config.trainer.v1.trainer_mode
    name = f"{_V1}.trainer_mode={mode}"
    if mode not in MODES:
        yield f"{name} is unknown; known: {', '.join(MODES)}"
    if mode == SYNC:
        return
    if not config.trainer.use_v1:
        yield f"{name} with trainer.use_v1=false, which always samples first and trains then; set it to true"
    if config.actor_rollout_ref.replay is not None:
        yield f"{name} with actor_rollout_ref.replay: stored trajectories are not sampled; set {_V1}.trainer_mode=sync"
    warm_up = config.trainer.v1[mode].num_warmup_batches
    if config.max_staleness < max(1, warm_up):
        yield (
            f"max_staleness={config.max_staleness} with {name}, whose trajectories are up to {max(1, warm_up)} updates "
            f"old from the start ({_V1}.{mode}.num_warmup_batches); raise it, or set {_V1}.trainer_mode=sync"
        )
    corrects = config.algorithm.rollout_correction.rollout_is is not None
    if corrects and not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield (
            "algorithm.rollout_correction.rollout_is needs the probabilities of the tokens as they were sampled; set "
            f"{_ROLLOUT}.calculate_log_probs=true"
        )
    if mode == SEPARATE:
        yield from _of_separate(config)


def _of_separate(config: DictConfig) -> Iterator[str]:
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    name = f"{_V1}.trainer_mode={SEPARATE}"
    batch, mini, updates = (
        config.data.train_batch_size,
        actor.ppo_mini_batch_size,
        config.trainer.v1.separate_async.parameter_sync_step,
    )
    if batch != updates * mini:
        yield (
            f"{name} makes a step of {_V1}.separate_async.parameter_sync_step={updates} updates of "
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} prompts, and data.train_batch_size is {batch}; make "
            f"it a multiple of the mini-batch, and leave the number of updates out"
        )
    if not rollout.nnodes or not rollout.n_gpus_per_node:
        yield (
            f"{name} samples on GPUs of its own, and there are {rollout.nnodes} nodes with {rollout.n_gpus_per_node} "
            f"of them; set {_ROLLOUT}.nnodes (ROLLOUT_NNODES) and {_ROLLOUT}.n_gpus_per_node (ROLLOUT_GPUS)"
        )
    elif rollout.nnodes * rollout.n_gpus_per_node % replica_size(rollout):
        yield (
            f"the {rollout.nnodes * rollout.n_gpus_per_node} GPUs that only sample are no multiple of the "
            f"{replica_size(rollout)} of an engine ({_ROLLOUT}.tensor_model_parallel_size, …); change one of them"
        )
    yield from _of_backend(config)
    model = config.actor_rollout_ref.model
    if (model.get("lora_rank") or model.get("lora", {}).get("rank")) and not model.lora.merge:
        yield (
            f"{name} with an adapter (LoRA): only whole weights are sent, and without the adapter; set "
            "actor_rollout_ref.model.lora.merge=true"
        )
    if need_reward_model(config) and not config.reward.reward_model.enable_resource_pool:
        yield (
            f"{name} with a reward model on the GPUs that sample, which are never free; give it some of its own: "
            "reward.reward_model.enable_resource_pool=true"
        )


def _of_backend(config: DictConfig) -> Iterator[str]:
    rollout, device = config.actor_rollout_ref.rollout, "cpu" if config.trainer.device == "cpu" else "cuda"
    backend, on_cpu = rollout.checkpoint_engine.backend, device == "cpu"
    sampler = "sglang" if OmegaConf.select(rollout, "name") == "sglang" else "vllm"
    known = [name for name, each in CHECKPOINT_ENGINES.items() if each.between == device and sampler in each.rollouts]
    own_module = rollout.checkpoint_engine.custom_backend_module
    if backend not in known and (on_cpu or not own_module or backend == "naive"):
        yield (
            f"{_BACKEND}={backend} with {_V1}.trainer_mode={SEPARATE} cannot carry weights from one "
            f"{'process to another on a CPU' if on_cpu else 'GPU to another'}; take {' or '.join(known)}"
        )
