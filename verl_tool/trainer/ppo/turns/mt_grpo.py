"""`algorithm.adv_estimator=mt_grpo`: GRPO in which each turn has an advantage of its own.

MT-GRPO of "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Reward Design" (arXiv 2505.11821v2, equations
5, 6 and 10 to 12; first called "… via Turn-Level Credit Assignment"). Trajectory i of a group has K_i turns of the
model's, an outcome reward R^O_i and turn rewards R^I_i,k. With A^O_i and A^I_i,k those rewards less their mean in the
group, over their standard deviation there, each token of turn k has the advantage

    A_i,k = sum over l = k … K_i of α^(l-k) λ A^I_i,l  +  α^(K_i-k) A^O_i

α is ``algorithm.mt_grpo.discount`` and λ ``algorithm.mt_grpo.turn_weight``, the `turn_advantage_coef` of the authors'
code (Multi-Turn-RL-Agent, `mt_grpo_env_trainer.py`). Both are 1 by default, as there. With turn rewards of 0 and α = 1
this is GRPO.

Where the paper says nothing, or something that does not fit rollouts of unequal length:

- The paper samples G continuations of each turn, G^(K-1) trajectories, so that all k-th turns that it compares follow
  the same history. Here a group is G whole trajectories, as in the authors' code, and their k-th turns are compared.
- The paper's trajectories have equally many turns. Here the k-th turn is compared with the k-th turns of those
  trajectories of the group that have one, answers among them. A turn for which the reward manager gives no reward, such
  as an answer or a turn that was cut, has turn reward 0: to make no call where others call with success is a
  disadvantage, as in the authors' code. A turn that no other trajectory of the group reaches has turn advantage 0.
- Tokens in the loss that are of no turn of the model's (observations, with `mask_observations=false`) have A^O_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

MT_GRPO = "mt_grpo"
EPSILON = 1e-6
"""Added to standard deviations, as verl's GRPO does."""


@register_adv_est(MT_GRPO)
def compute_mt_grpo_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    turn_ids: torch.Tensor,
    turn_rewards: torch.Tensor,
    config: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages, and the same once more as returns. [batch, response_length]

    token_level_rewards: their sum in a row is the outcome reward. [batch, response_length]
    response_mask: 1 on tokens in the loss; all others have advantage 0. [batch, response_length]
    index: the group of each row. [batch]
    turn_ids: k on tokens of the model's k-th turn, from 1, and 0 on others. [batch, response_length]
    turn_rewards: of turn k in column k - 1, with 0 behind a row's last turn. [batch, turns]
    config: verl's ``algorithm``; of it, ``norm_adv_by_std_in_grpo`` (false: nothing is divided by a standard deviation,
        neither outcomes nor turns) and ``mt_grpo``.
    """
    config = config or {}
    options = config.get("mt_grpo") or {}
    by_std = bool(config.get("norm_adv_by_std_in_grpo", True))
    outcomes, _ = compute_grpo_outcome_advantage(
        token_level_rewards, torch.ones_like(response_mask), index, epsilon=EPSILON, norm_adv_by_std_in_grpo=by_std
    )
    outcome = outcomes[:, :1].double()
    last = turn_ids.max(dim=1, keepdim=True).values
    written = torch.arange(1, turn_rewards.shape[1] + 1) <= last
    _, groups = np.unique(np.asarray(index, dtype=str), return_inverse=True)
    turns = _turn_advantages(turn_rewards.double(), written, torch.from_numpy(groups), by_std)
    weighted = float(options.get("turn_weight", 1.0)) * turns
    by_turn = _with_what_follows(outcome, weighted, last, float(options.get("discount", 1.0)))
    advantages = torch.cat([outcome, by_turn], dim=1).gather(1, turn_ids)
    advantages = advantages.to(token_level_rewards.dtype) * response_mask
    return advantages, advantages


def _turn_advantages(rewards: torch.Tensor, written: torch.Tensor, groups: torch.Tensor, by_std: bool) -> torch.Tensor:
    """Each turn's reward compared with those of the same turn in its group; 0 where there is no other. [batch, turns]

    written: which turns there are. [batch, turns]
    groups: numbers from 0. [batch]
    """

    def in_group(values: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(int(groups.max()) + 1, values.shape[1], dtype=values.dtype)
        return sums.index_add_(0, groups, values)[groups]

    there = written.to(rewards.dtype)
    count = in_group(there)
    advantages = (rewards - in_group(rewards * there) / count.clamp(min=1)) * there
    if by_std:
        variance = in_group(advantages.square()) / (count - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + EPSILON)
    return torch.where(count > 1, advantages, torch.zeros_like(advantages))


def _with_what_follows(outcome: torch.Tensor, turns: torch.Tensor, last: torch.Tensor, discount: float) -> torch.Tensor:
    """Each turn's own advantage and, discounted, those of later turns and the outcome's. [batch, turns]

    outcome: [batch, 1]
    turns: advantages of turns; 0 behind the `last` of a row. [batch, turns]
    last: number of the last turn. [batch, 1]
    """
    summed = torch.empty_like(turns)
    following = outcome
    for column in reversed(range(turns.shape[1])):
        turn = column + 1
        behind = torch.where(turn < last, discount * following, following)
        following = torch.where(turn <= last, turns[:, column:turn] + behind, outcome)
        summed[:, column:turn] = following
    return summed
