"""Metrics of turns: their rewards, and their share in the variance of advantages."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from verl_tool.agent_workers.reward_manager.base import TURN_REWARDS
from verl_tool.trainer.ppo.graded_trajectories import GradedTrajectory

MAX_TURNS = 8
"""Maximum number of turns with a metric of their own."""
SHARE = "agent/turn_advantage/variance_share"


def turn_reward_metrics(outcomes: Sequence[GradedTrajectory], prefix: str = "agent") -> dict[str, float]:
    """Average the reward of each turn over the trajectories that have it. Empty if no turns are rewarded.

    ``{prefix}/turn_reward/K`` is the mean of the K-th turn, from 1 to `MAX_TURNS`, and ``{prefix}/turn_reward/sum`` the
    mean of the sums of trajectories. A turn without a reward counts as 0. Trajectories without a reward (`reward is
    None`) are left out.
    """
    rows = []
    for outcome in outcomes:
        text = outcome.reward_extra_info.get(TURN_REWARDS)
        if text is not None and outcome.trajectory.reward is not None:
            rewards = json.loads(text)
            rows.append(rewards + [0.0] * (outcome.trajectory.num_turns - len(rewards)))
    if not rows:
        return {}
    metrics = {f"{prefix}/turn_reward/sum": sum(map(sum, rows)) / len(rows)}
    for turn in range(min(max(map(len, rows)), MAX_TURNS)):
        rewards = [row[turn] for row in rows if len(row) > turn]
        metrics[f"{prefix}/turn_reward/{turn + 1}"] = sum(rewards) / len(rewards)
    return metrics


def variance_share(advantages: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Compute `SHARE`, the share of the variance of tokens' advantages that lies within trajectories, 0 to 1.

    Uses the law of total variance over the tokens in the loss. The share is 0 if all turns of a trajectory have the
    same advantage, as with GRPO, and 1 if all trajectories have the same mean. The result is empty if all advantages
    are equal. Both arguments are ``[batch, response_length]``.
    """
    written = mask.bool()
    values, there = advantages.double() * written, written.double()
    tokens = there.sum(dim=1, keepdim=True)
    own_mean = values.sum(dim=1, keepdim=True) / tokens.clamp(min=1)
    within = ((values - own_mean) * there).square().sum()
    total = ((values - values.sum() / tokens.sum().clamp(min=1)) * there).square().sum()
    return {SHARE: float(within / total)} if total > 0 else {}
