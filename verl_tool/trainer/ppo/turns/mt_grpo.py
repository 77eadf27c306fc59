"""`algorithm.adv_estimator=mt_grpo`: GRPO with an advantage for each turn.

MT-GRPO of "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Reward Design" (arXiv 2505.11821v2, equations
5, 6 and 10 to 12; earlier title "… via Turn-Level Credit Assignment"). Trajectory i of a group has K_i turns of the
model, an outcome reward R^O_i and turn rewards R^I_i,k. A^O_i and A^I_i,k are these rewards minus their mean in the
group, divided by their standard deviation in the group. Each token of turn k has the advantage

    A_i,k = sum over l = k … K_i of α^(l-k) λ A^I_i,l  +  α^(K_i-k) A^O_i

α is ``algorithm.mt_grpo.discount`` and λ ``algorithm.mt_grpo.turn_weight``, the `turn_advantage_coef` of the authors'
code (Multi-Turn-RL-Agent, `mt_grpo_env_trainer.py`). Both default to 1, as there. With turn rewards of 0 and α = 1 this
is GRPO.

Differences and additions to the paper, for rollouts of different lengths:

- The paper samples G continuations of each turn, G^(K-1) trajectories in total, so that all compared k-th turns have
  the same history. Here a group consists of G whole trajectories, as in the authors' code, and their k-th turns are
  compared.
- In the paper, all trajectories have the same number of turns. Here the k-th turn is compared with the k-th turns of
  the trajectories of the group that have one, including answers. A turn without a reward, such as an answer or a turn
  that was cut, has turn reward 0. As in the authors' code, making no call is a disadvantage where others call
  successfully. A turn that no other trajectory of the group reaches has turn advantage 0.
- Tokens in the loss that belong to no turn (observations, with `mask_observations=false`) have A^O_i.
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
    """Compute the advantages, and return them twice, also as returns. [batch, response_length]

    token_level_rewards: the sum over a row is its outcome reward. [batch, response_length]
    response_mask: 1 on tokens in the loss. Other tokens have advantage 0. [batch, response_length]
    index: the group of each row. [batch]
    turn_ids: k on tokens of the model's k-th turn, from 1, and 0 on other tokens. [batch, response_length]
    turn_rewards: the reward of turn k in column k - 1, and 0 after a row's last turn. [batch, turns]
    config: verl's ``algorithm``, of which ``norm_adv_by_std_in_grpo`` and ``mt_grpo`` are used. If the former is false,
        neither outcome nor turn rewards are divided by a standard deviation.
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
    by_turn = _discounted_sums(outcome, weighted, last, float(options.get("discount", 1.0)))
    advantages = torch.cat([outcome, by_turn], dim=1).gather(1, turn_ids)
    advantages = advantages.to(token_level_rewards.dtype) * response_mask
    return advantages, advantages


def _turn_advantages(rewards: torch.Tensor, written: torch.Tensor, groups: torch.Tensor, by_std: bool) -> torch.Tensor:
    """Compare each turn's reward with those of the same turn in its group. 0 if there is no other. [batch, turns]

    written: whether the row has this turn. [batch, turns]
    groups: numbers of the groups, from 0. [batch]
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


def _discounted_sums(outcome: torch.Tensor, turns: torch.Tensor, last: torch.Tensor, discount: float) -> torch.Tensor:
    """Add the discounted advantages of later turns and of the outcome to those of each turn. [batch, turns]

    outcome: advantage of the outcome. [batch, 1]
    turns: advantages of the turns, 0 after the last one of a row. [batch, turns]
    last: number of the last turn of each row. [batch, 1]
    """
    summed = torch.empty_like(turns)
    following = outcome
    for column in reversed(range(turns.shape[1])):
        turn = column + 1
        behind = torch.where(turn < last, discount * following, following)
        following = torch.where(turn <= last, turns[:, column:turn] + behind, outcome)
        summed[:, column:turn] = following
    return summed
