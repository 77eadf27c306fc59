"""Whether a start goes on with the run whose checkpoints lie in its folder: its training must not change under way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_tool.errors import ConfigError
from verl_tool.trainer.composition import leaves
from verl_tool.trainer.run_folder.checkpoints import latest_step

_ACTOR, _ROLLOUT, _AGENT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.agent"
SAME = (
    "algorithm",
    "data",
    "reward",
    _AGENT,
    "actor_rollout_ref.model",
    "critic.enable",
    "critic.model.path",
    "critic.optim",
    f"{_ACTOR}.optim",
    f"{_ACTOR}.policy_loss",
    *(
        f"{_ACTOR}.{name}"
        for name in (
            "ppo_mini_batch_size", "ppo_epochs", "loss_agg_mode", "loss_scale_factor", "clip_ratio", "clip_ratio_low",
            "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", "use_kl_loss", "kl_loss_coef", "kl_loss_type",
            "entropy_coeff", "shuffle", "data_loader_seed", "freeze_vision_tower",
        )
    ),
    *(
        f"critic.{name}"
        for name in (
            "ppo_mini_batch_size", "ppo_epochs", "loss_agg_mode", "loss_scale_factor", "cliprange_value", "shuffle",
            "data_loader_seed",
        )
    ),
    *(f"{_ROLLOUT}.{name}" for name in ("n", "temperature", "top_p", "top_k", "do_sample", "ignore_eos")),
    "distillation",
    "tool_server.start",
    "trainer.critic_warmup",
    "trainer.use_v1",
    "trainer.v1",
)  # fmt: skip
"""Settings, and groups of them, that decide what is learned from what."""
ASYNCHRONOUS = (
    *("trainer.v1.colocate_async", "trainer.v1.separate_async"),
    *("trainer.v1.sampler.max_off_policy_strategy", "trainer.v1.sampler.max_off_policy_threshold"),
)
"""Settings that nobody reads where a step is trained on what it sampled itself."""
MAY_DIFFER = (
    # Follows from the installed packages, where nobody names it.
    "actor_rollout_ref.model.override_config.attn_implementation",
    *(
        f"data.{name}"
        for name in (
            "val_files", "val_batch_size", "val_max_samples", "dataloader_num_workers", "cache_dir", "use_shm",
            "filter_overlong_prompts_workers", "validation_shuffle",
        )
    ),
    *(
        f"{_AGENT}.{name}"
        for name in (
            "tool_server_url", "enable_tqdm", "max_concurrent_trajectories", "generation_timeout", "tool_call_timeout",
            "tool_queue_timeout",
            "tool_call_max_retries", "tool_call_retry_delay", "tool_call_max_workers", "tool_call_request_interval",
            "max_fault_fraction", "max_call_fault_fraction", "max_reward_fault_fraction", "tool_config.server_url",
            "tool_config.timeout", "tool_config.queue_timeout", "tool_config.max_retries",
            "tool_config.retry_delay", "tool_config.max_workers", "tool_config.request_interval",
        )
    ),
    *(
        f"reward.{name}"
        for name in (
            "num_workers", "sandbox_fusion", "reward_kwargs.server_url", "reward_kwargs.api_key",
            "reward_kwargs.timeout_seconds", "reward_kwargs.max_connections", "reward_kwargs.queue_seconds",
            "reward_kwargs.compare_processes", "reward_model.enable_resource_pool", "reward_model.n_gpus_per_node",
            "reward_model.nnodes",
        )
    ),
    *(
        f"reward.reward_model.rollout.{name}"
        for name in (
            "gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine",
            "data_parallel_size", "expert_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
            "max_num_batched_tokens", "max_num_seqs", "load_format", "layered_summon", "scheduling_policy",
            "multi_stage_wake_up", "enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats",
        )
    ),
    *(
        f"actor_rollout_ref.model.{name}"
        for name in (
            "use_shm", "use_liger", "use_remove_padding", "use_fused_kernels", "fused_kernel_options",
            "enable_gradient_checkpointing", "enable_activation_offload", "external_lib", "tiled_mlp",
        )
    ),
    f"{_ACTOR}.optim.total_training_steps",
    "critic.optim.total_training_steps",
)  # fmt: skip
"""Those among them that do not: where and how fast something runs, and what validation looks at."""
_DISPLAYED = 8


def check_same_run(config: DictConfig) -> None:
    """Raises ConfigError that names each differing setting if the folder's checkpoints are of another training. If they
    are of this one, the config has what its tools told when it began (``tool_server.tools``).

    Only where verl would go on by itself (``trainer.resume_mode=auto``): who names a checkpoint means that one.
    """
    saved = Path(config.run_dir) / "config.yaml"
    folder = Path(config.trainer.default_local_dir)
    if config.trainer.resume_mode != "auto" or not saved.is_file() or latest_step(folder) is None:
        return
    try:
        earlier = OmegaConf.load(saved)
        before, now = (leaves(OmegaConf.to_container(each, resolve=True)) for each in (earlier, config))
        found = differences(before, now)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{saved}, by which {folder} was trained, cannot be read: {error}") from error
    if found:
        more = f" and {len(found) - _DISPLAYED} more" if len(found) > _DISPLAYED else ""
        raise ConfigError(
            f"{folder} holds checkpoints of a run with other settings: {', '.join(found[:_DISPLAYED])}{more}. Give "
            "another run_dir (in a recipe: RUN=...), or the settings of that run; to begin anew there: "
            "trainer.resume_mode=disable; to go on from a checkpoint all the same: trainer.resume_mode=resume_path "
            f"trainer.resume_from_path={folder}/global_step_..."
        )
    config.tool_server.tools = OmegaConf.select(earlier, "tool_server.tools")


def differences(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """``name=now (was earlier)`` of every setting that must be the same and is not. A missing one is as null.

    Paths are the same if they name one place: the folder of a run may be told in another way.
    """
    sync = all(run.get("trainer.v1.trainer_mode", "sync") == "sync" for run in (earlier, now))
    spared = (*MAY_DIFFER, *(ASYNCHRONOUS if sync else ()))
    names = sorted(name for name in {*earlier, *now} if _within(name, SAME) and not _within(name, spared))
    return [
        f"{name}={now.get(name)!r} (was {earlier.get(name)!r})"
        for name in names
        if _place(name, earlier.get(name)) != _place(name, now.get(name))
    ]


def _place(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_place(name, item) for item in value]
    if isinstance(value, str) and name.endswith(("path", "_files")) and "://" not in value:
        return os.path.realpath(os.path.expanduser(value))
    return value


def _within(name: str, groups: tuple[str, ...]) -> bool:
    return any(name == group or name.startswith(f"{group}.") for group in groups)
