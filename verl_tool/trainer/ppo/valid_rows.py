"""Restrict verl's KL penalty and metrics to valid rows. Written for verl 0.9.0 and 0.9.1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from verl import DataProto
from verl_tool.trainer.ppo.invalid import invalid_rows

Penalty = Callable[..., tuple[DataProto, dict[str, Any]]]
"""Type of verl's ``apply_kl_penalty(data, kl_ctrl=…, kl_penalty=…) -> (data, metrics)``."""
Metrics = Callable[..., dict[str, Any]]
"""Type of verl's ``compute_data_metrics(batch=…, use_critic=…)``."""
_REWARD_METRICS = ("critic/score/", "critic/rewards/")


def penalise_rows_in_loss(penalise: Penalty) -> Penalty:
    """Apply verl's `apply_kl_penalty` to rows with a token in the loss. Its controller would see a KL of 0 in
    others."""

    def apply_kl_penalty(data: DataProto, kl_ctrl: Any, **options: Any) -> tuple[DataProto, dict[str, Any]]:
        rows = np.flatnonzero(data.batch["response_mask"].any(dim=-1).numpy())
        if len(rows) == len(data):
            return penalise(data, kl_ctrl=kl_ctrl, **options)
        rewards = data.batch["token_level_scores"].clone()
        metrics = {"actor/reward_kl_penalty_coeff": kl_ctrl.value}
        if len(rows):
            part, metrics = penalise(data.select_idxs(rows), kl_ctrl=kl_ctrl, **options)
            rewards[rows] = part.batch["token_level_rewards"]
        data.batch["token_level_rewards"] = rewards
        return data, metrics

    return apply_kl_penalty


def summarise_valid_rows(summarise: Metrics) -> Metrics:
    """Apply verl's `compute_data_metrics` to rows with a reward, and leave out metrics that are unknown."""

    def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, Any]:
        rows = np.flatnonzero(~np.array(invalid_rows(batch.non_tensor_batch, len(batch)), dtype=bool))
        if len(rows):
            return without_nan(summarise(batch=batch.select_idxs(rows), use_critic=use_critic))
        return without_rewards(without_nan(summarise(batch=batch, use_critic=use_critic)))

    return compute_data_metrics


def without_nan(metrics: dict[str, Any]) -> dict[str, Any]:
    """Remove metrics that are NaN."""
    return {name: v for name, v in metrics.items() if not (isinstance(v, float) and math.isnan(v))}


def without_rewards(metrics: dict[str, Any]) -> dict[str, Any]:
    """Remove metrics of rewards, for a batch in which no row has one."""
    return {name: value for name, value in metrics.items() if not name.startswith(_REWARD_METRICS)}
