"""Reject settings of the algorithm that cannot work, or with which excluded rows would change what others learn.

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

from verl_tool.agent_workers.reward_manager.base import TURN_REWARDS
from verl_tool.errors import ConfigError
from verl_tool.trainer.ppo.rows.rows_check import check_several_rows
from verl_tool.trainer.ppo.turns.mt_grpo import MT_GRPO
from verl_tool.trainer.ppo.turns.turn_columns import TURN_IDS, takes_turns

PASSED = frozenset(
    (
        *("token_level_rewards", "response_mask", "config", "index", "values", "gamma", "lam"),
        *("norm_adv_by_std_in_grpo", TURN_IDS, TURN_REWARDS),
    )
)
"""Arguments that both trainers pass to an estimator."""
ONLY_V0 = frozenset(("reward_baselines", "sum_pi_squared", "old_log_probs", "batch", "non_tensor_batch"))
"""Arguments that only the trainer of ``trainer.use_v1=false`` passes."""


def check_algorithm(config: DictConfig) -> None:
    """Raise ConfigError that names the first setting that cannot work."""
    for problem in _problems(config):
        raise ConfigError(problem)
    agent = config.actor_rollout_ref.agent
    if agent.get("context", "append") != "append" or agent.get("subagents", False):
        check_several_rows(config)


def _problems(config: DictConfig) -> Iterator[str]:
    yield from _check_estimator(config)
    yield from _check_resampling(config)
    if config.actor_rollout_ref.agent.get("subagents", False):
        yield from _check_subagents(config)
    for name in ("actor_rollout_ref.actor", "critic"):
        yield from _check_loss(config, name)


def _check_subagents(config: DictConfig) -> Iterator[str]:
    """Reject settings that depend on the order of tokens. The row of a sub-agent comes before the row of the agent that
    waits for it, although a part of that row was written earlier."""
    name, gamma = str(config.algorithm.adv_estimator), config.algorithm.get("gamma", 1.0)
    if name == "gae" or takes_turns(name):
        yield (
            f"actor_rollout_ref.agent.subagents=true with algorithm.adv_estimator={name}, which depends on the order "
            "of tokens; use one that depends on the reward of a rollout only, such as grpo"
        )
    if gamma != 1.0:
        yield f"actor_rollout_ref.agent.subagents=true with algorithm.gamma={gamma} discounts by tokens; set it to 1.0"


def _check_estimator(config: DictConfig) -> Iterator[str]:
    name = str(config.algorithm.adv_estimator)
    option = f"algorithm.adv_estimator={name}"
    if name not in ADV_ESTIMATOR_REGISTRY:
        known = ", ".join(sorted(ADV_ESTIMATOR_REGISTRY))
        yield f"{option} is unknown; known: {known}. A module in VERL_USE_EXTERNAL_MODULES registers one of your own"
        return
    parameters = inspect.signature(ADV_ESTIMATOR_REGISTRY[name]).parameters
    required = {n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    unknown = required - PASSED - ONLY_V0
    if unknown:
        yield f"{option} needs {', '.join(sorted(unknown))}, which verl passes to no estimator"
    missing = set(parameters) & ONLY_V0
    if config.trainer.use_v1 and missing:
        yield f"{option} needs {', '.join(sorted(missing))}, which trainer.use_v1=true does not make; set it to false"
    if config.actor_rollout_ref.rollout.n == 1 and name in ("grpo_passk", "rloo_vectorized"):
        yield f"{option} compares samples of one prompt and actor_rollout_ref.rollout.n=1 makes one; set 2 or more"
    if "sum_pi_squared" in parameters and not config.actor_rollout_ref.actor.get("calculate_sum_pi_squared", False):
        yield f"{option} needs actor_rollout_ref.actor.calculate_sum_pi_squared=true"
    if name == "gdpo" and not config.algorithm.get("gdpo_reward_keys"):
        yield f"{option} needs algorithm.gdpo_reward_keys, names of the reward manager's values (acc, base_score, …)"
    changed = [f"algorithm.mt_grpo.{key}={value}" for key, value in config.algorithm.mt_grpo.items() if value != 1]
    if changed and name != MT_GRPO:
        yield f"{changed[0]} has no effect with {option}; set one of them"


def _check_resampling(config: DictConfig) -> Iterator[str]:
    if not config.algorithm.get("use_pf_ppo", False):
        return
    if config.algorithm.adv_estimator != "gae":
        yield (
            f"algorithm.use_pf_ppo=true has no effect with algorithm.adv_estimator={config.algorithm.adv_estimator}: "
            "only gae resamples; set one of them"
        )
    if config.trainer.use_v1:
        yield (
            "algorithm.use_pf_ppo=true with trainer.use_v1=true, which would write the returns of resampled rows onto "
            "other rows; set trainer.use_v1=false"
        )


def _check_loss(config: DictConfig, part: str) -> Iterator[str]:
    section = config.actor_rollout_ref.actor if part != "critic" else config.critic
    mode = section.get("loss_agg_mode", "token-mean")
    if mode == "token-sum":
        yield (
            f"{part}.loss_agg_mode=token-sum does not normalise, so that an update shrinks with each trajectory that "
            "is left out; use token-mean or seq-mean-token-sum"
        )
    if mode == "seq-mean-token-sum-norm" and section.get("loss_scale_factor") is None:
        yield (
            f"{part}.loss_agg_mode=seq-mean-token-sum-norm divides by the longest row of each micro-batch, even if it "
            f"is left out; set {part}.loss_scale_factor, to data.max_response_length for example"
        )
    if part != "critic" and section.policy_loss.get("loss_mode", "vanilla") == "geo_mean":
        yield (
            f"{part}.policy_loss.loss_mode=geo_mean is a mean over all rows of a micro-batch, including those that are "
            "left out; use vanilla or gspo"
        )
