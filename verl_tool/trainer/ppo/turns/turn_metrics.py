"""Metrics of turns: what they were rewarded with, and how much of the advantages they make up."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from verl_tool.agent_workers.reward_manager.base import TURN_REWARDS
from verl_tool.trainer.ppo.graded_trajectories import GradedTrajectory

MAX_TURNS = 8
"""Turns with a metric of their own."""
SHARE = "agent/turn_advantage/variance_share"


def turn_reward_metrics(outcomes: Sequence[GradedTrajectory], prefix: str = "agent") -> dict[str, float]:
    """Mean reward of each turn, over the trajectories that have this turn; nothing if no turns are rewarded.

    ``{prefix}/turn_reward/K`` is of the K-th turn, from 1 to `MAX_TURNS`; ``{prefix}/turn_reward/sum`` is the mean of
    a trajectory's sum. A turn that the reward manager gave no reward for counts as 0. Trajectories without a reward
    (`reward is None`) are left out.
    """
    rows = []
    for outcome in outcomes:
        description = outcome.reward_extra_info.get(TURN_REWARDS)
        if description is not None and outcome.trajectory.reward is not None:
            provided = json.loads(description)
            rows.append(provided + [0.0] * (outcome.trajectory.num_turns - len(provided)))
    if not rows:
        return {}
    metrics = {f"{prefix}/turn_reward/sum": sum(map(sum, rows)) / len(rows)}
    for turn in range(min(max(map(len, rows)), MAX_TURNS)):
        rewards = [row[turn] for row in rows if len(row) > turn]
        metrics[f"{prefix}/turn_reward/{turn + 1}"] = sum(rewards) / len(rewards)
    return metrics


def variance_share(advantages: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """`SHARE`: how much of the variance of the tokens' advantages lies within trajectories, 0 to 1.

    By the law of total variance over the tokens in the loss. 0: all turns of a trajectory have one advantage, as with
    GRPO. 1: trajectories differ by nothing but their turns. Nothing if all advantages are equal. Both arguments are
    ``[batch, response_length]``.
    """
    written = mask.bool()
    values, there = advantages.double() * written, written.double()
    tokens = there.sum(dim=1, keepdim=True)
    own_mean = values.sum(dim=1, keepdim=True) / tokens.clamp(min=1)
    within = ((values - own_mean) * there).square().sum()
    total = ((values - values.sum() / tokens.sum().clamp(min=1)) * there).square().sum()
    return {SHARE: float(within / total)} if total > 0 else {}
