"""Numbers that settings may be. Checked before anything is calculated from them."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from verl_tool.errors import ConfigError

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may be; where it is null it is not looked at."""

    setting: str
    low: float
    high: float = float("inf")
    open_below: bool = False
    """`low` itself is out of the range."""

    def problem(self, config: DictConfig) -> str | None:
        """What is wrong with the setting's value, if anything."""
        try:
            value = OmegaConf.select(config, self.setting)
        except InterpolationResolutionError:
            return None  # calculated from another setting, which is named itself
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"{self.setting}={value!r} is no number; {self._describe()}"
        if (value <= self.low if self.open_below else value < self.low) or value > self.high:
            return f"{self.setting}={value} is out of its range; {self._describe()}"
        return None

    def _describe(self) -> str:
        below = f"{'above' if self.open_below else 'at least'} {self.low:g}"
        above = f" and at most {self.high:g}" if self.high != float("inf") else ""
        return f"set it to {below}{above}"


RANGES = (
    Range("data.train_batch_size", 1),
    Range("data.max_prompt_length", 1),
    Range("data.max_response_length", 1),
    Range(f"{_ROLLOUT}.n", 1),
    Range(f"{_ROLLOUT}.temperature", 0),
    Range(f"{_ROLLOUT}.top_p", 0, 1, open_below=True),
    Range(f"{_ROLLOUT}.top_k", -1),
    Range(f"{_ROLLOUT}.gpu_memory_utilization", 0, 1, open_below=True),
    Range(f"{_ROLLOUT}.tensor_model_parallel_size", 1),
    Range(f"{_ROLLOUT}.val_kwargs.n", 1),
    Range(f"{_ROLLOUT}.val_kwargs.temperature", 0),
    Range(f"{_ROLLOUT}.val_kwargs.top_p", 0, 1, open_below=True),
    Range(f"{_ACTOR}.ppo_mini_batch_size", 1),
    Range(f"{_ACTOR}.ppo_epochs", 1),
    Range(f"{_ACTOR}.clip_ratio", 0),
    Range(f"{_ACTOR}.grad_clip", 0, open_below=True),
    Range(f"{_ACTOR}.kl_loss_coef", 0),
    Range(f"{_ACTOR}.optim.lr", 0),
    Range(f"{_ACTOR}.optim.weight_decay", 0),
    Range(f"{_ACTOR}.optim.lr_warmup_steps_ratio", 0, 1),
    Range("actor_rollout_ref.model.lora_rank", 0),
    Range("algorithm.gamma", 0, 1),
    Range("algorithm.lam", 0, 1),
    Range("algorithm.mt_grpo.discount", 0, 1),
    Range("algorithm.mt_grpo.turn_weight", 0),
    Range("trainer.nnodes", 1),
    Range("trainer.n_gpus_per_node", 1),
    Range("trainer.total_epochs", 1),
    Range("trainer.total_training_steps", 1),
    Range("trainer.save_freq", -1),
    Range("trainer.test_freq", -1),
    Range("tool_server.port", 1, 65535),
    Range("tool_server.start_timeout", 0, open_below=True),
    Range("tool_server.max_restarts", 0),
    Range("max_staleness", 1),
    Range("stall_timeout", 0, open_below=True),
    Range("resource_timeout", 0, open_below=True),
    Range("gpu_memory_gb", 0, open_below=True),
)


def check_ranges(config: DictConfig) -> None:
    """Raise ConfigError that names all settings that are out of their ranges."""
    problems = [problem for each in RANGES if (problem := each.problem(config))]
    if problems:
        raise ConfigError("\n       ".join(problems))
