"""Reject settings that cannot train several rows per rollout. Written for verl 0.9.0 and 0.9.1."""

from __future__ import annotations

import math
from collections.abc import Iterator

from omegaconf import DictConfig

from verl_tool.errors import ConfigError

COLOCATED_REWARD_MODEL = (
    "a rollout has several rows, and a reward model that shares the trainer's GPUs scores each row by itself; set "
    "reward.reward_model.enable_resource_pool=true, or grade with a reward manager"
)
LOSSES_BY_ROW = frozenset(("gspo", "geo_mean"))
"""Policy losses with one importance ratio per row."""


def check_several_rows(config: DictConfig) -> None:
    """Raise ConfigError for the first setting under which a cut of a rollout into rows would change its gradient."""
    for problem in _problems(config):
        raise ConfigError(f"several rows per rollout: {problem}")


def rows_multiple(config: DictConfig, num_mini_batches: int) -> int:
    """Return what the number of rows per rank in a mini-batch must be a multiple of. 1 without fixed micro-batches.

    The micro-batches of an update divide the mini-batch. Those of log-probabilities and values divide all rows of the
    rank.
    """
    actor, critic = config.actor_rollout_ref.actor, config.critic
    update = [(actor, "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz")]
    infer = [
        (section, "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz")
        for section in (config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref)
    ]
    if str(config.algorithm.adv_estimator) == "gae":
        update.append((critic, "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"))
        infer.append((critic, "forward_micro_batch_size_per_gpu", "use_dynamic_bsz"))
    of_all = math.lcm(*_fixed_sizes(infer))
    return math.lcm(*_fixed_sizes(update), of_all // math.gcd(of_all, num_mini_batches))


def _fixed_sizes(parts: list[tuple[DictConfig, str, str]]) -> list[int]:
    return [int(section[size]) for section, size, dynamic in parts if not section.get(dynamic) and section.get(size)]


def _problems(config: DictConfig) -> Iterator[str]:
    actor, critic = config.actor_rollout_ref.actor, config.critic
    if not config.trainer.use_v1:
        yield "they need trainer.use_v1=true; the older trainer takes one row of each sample"
    loss = actor.policy_loss.get("loss_mode", "vanilla")
    if loss in LOSSES_BY_ROW:
        yield (
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}: it has one importance ratio per row; set it to "
            "vanilla or cispo"
        )
    for name, section in (("actor_rollout_ref.actor", actor), ("critic", critic)):
        if section.get("shuffle", False):
            yield f"{name}.shuffle=true would split rollouts over mini-batches; set it to false"
    if str(config.algorithm.adv_estimator) == "gae" and critic.ppo_mini_batch_size != actor.ppo_mini_batch_size:
        yield (
            f"critic.ppo_mini_batch_size={critic.ppo_mini_batch_size} and actor_rollout_ref.actor.ppo_mini_batch_size="
            f"{actor.ppo_mini_batch_size}: one order of rows serves both; set them to the same number"
        )
    correction = config.algorithm.get("rollout_correction")
    if correction and correction.get("bypass_mode"):
        for option in ("rollout_is", "rollout_rs"):
            if "seq" in str(correction.get(option) or ""):
                yield (
                    f"algorithm.rollout_correction.{option}={correction[option]} with bypass_mode=true is computed for "
                    "each row by itself; take a token's, or bypass_mode=false"
                )
    if config.get("distillation") and config.distillation.get("enabled", False):
        yield "distillation.enabled=true teaches the last row only; set it to false"
    if config.actor_rollout_ref.rollout.get("enable_rollout_routing_replay", False):
        option = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
        yield f"{option}=true keeps the experts of one row; set it to false"
