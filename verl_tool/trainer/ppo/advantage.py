"""Compute advantages as if trajectories invalidated by infrastructure had never been sampled.

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from verl import DataProto
from verl_tool.trainer.ppo.invalid import invalid_rows, singleton_rows
from verl_tool.trainer.ppo.turns import mt_grpo as mt_grpo  # registers its estimator
from verl_tool.trainer.ppo.turns.turn_columns import by_turns, takes_turns

Compute = Callable[..., DataProto]
"""Type of verl's ``compute_advantage(data, adv_estimator=…, …)``, which adds advantages and returns to the batch."""


def without_invalid(compute: Compute) -> Compute:
    """Apply verl's `compute_advantage` to the valid rows only. All others get advantage and return 0 and an empty mask.

    This works for every estimator: normalisation over a group or the batch uses valid rows only, and so does
    resampling. In addition to invalid rows, these are left out: the only row left in a group, if the estimator's
    baseline is the group, and rows whose own baseline is NaN (ReMax).

    Rewards are first moved to tokens that the model wrote, because several estimators ignore all others. Estimators
    that use turns receive them (`turns.turn_columns`).
    """

    def compute_advantage(data: DataProto, adv_estimator: str, *args: Any, **kwargs: Any) -> DataProto:
        rows = np.flatnonzero(_find_valid(data, adv_estimator, int(kwargs.get("num_repeat", 1))))
        if len(rows) == len(data):
            return _compute(compute, data, adv_estimator, *args, **kwargs)
        part = data.select_idxs(rows)
        if len(rows):
            part = _compute(compute, part, adv_estimator, *args, **kwargs)
        return _put_back(data, part, rows)

    return compute_advantage


def compares_within_groups(adv_estimator: str) -> bool:
    """Return whether the estimator's baseline is the group of samples of a prompt, so that it has a parameter
    `index`."""
    return "index" in _parameters(adv_estimator)


def on_model_tokens(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Move each reward to the last of the model's tokens up to it, or else to the first one after it.

    A trajectory may end with an observation, so that its reward is on a masked token. Rows without tokens of the model
    stay unchanged. Both arguments are ``[batch, response_length]``.
    """
    written = mask.bool()
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    before = torch.where(written, places, -1).cummax(dim=1).values
    first = written.int().argmax(dim=1, keepdim=True)
    target = torch.where(before >= 0, before, first.expand_as(before))
    moved = torch.zeros_like(rewards).scatter_add_(1, target, rewards)
    return torch.where(written.any(dim=1, keepdim=True), moved, rewards)


def _parameters(adv_estimator: str) -> Any:
    return inspect.signature(get_adv_estimator_fn(adv_estimator)).parameters


def _find_valid(data: DataProto, adv_estimator: str, sampled: int) -> np.ndarray:
    """Return which rows get advantages. Each prompt was sampled `sampled` times. [batch]"""
    valid = ~np.array(invalid_rows(data.non_tensor_batch, len(data)))
    if "reward_baselines" in data.batch:
        valid &= ~data.batch["reward_baselines"].isnan().numpy()
    if not compares_within_groups(adv_estimator) or "uid" not in data.non_tensor_batch:
        return valid
    comparable = valid.copy()
    if "sum_pi_squared" in _parameters(adv_estimator):
        # A baseline per token is computed from tokens in the loss only.
        comparable &= data.batch["response_mask"].any(dim=1).numpy()
    return valid & ~singleton_rows(data.non_tensor_batch["uid"], comparable, sampled)


def _compute(compute: Compute, data: DataProto, adv_estimator: str, *args: Any, **kwargs: Any) -> DataProto:
    mask = data.batch["response_mask"]
    data.batch["token_level_rewards"] = on_model_tokens(data.batch["token_level_rewards"], mask)
    if takes_turns(adv_estimator):
        return by_turns(data, adv_estimator, kwargs.get("config"))
    try:
        done = compute(data, adv_estimator, *args, **kwargs)
    except ValueError:
        if mask.sum() > 1:
            raise
        # verl's `masked_whiten` rejects a single token. It equals the mean, so that whitening would give 0.
        for name in ("advantages", "returns"):
            data.batch[name] = torch.zeros_like(data.batch["token_level_rewards"])
        return data
    for name in ("advantages", "returns"):
        # The baseline of a group without tokens in the loss may be 0/0, and NaN times a mask of 0 is NaN.
        masked_nan = done.batch[name].isnan() & ~done.batch["response_mask"].bool()
        done.batch[name] = done.batch[name].masked_fill(masked_nan, 0.0)
    return done


def _put_back(data: DataProto, part: DataProto, rows: np.ndarray) -> DataProto:
    """Write `part` into the rows `rows` of `data`. All other rows get advantage and return 0 and an empty mask."""
    at = torch.from_numpy(rows)
    out = torch.ones(len(data), dtype=torch.bool)
    out[at] = False
    for name in ("advantages", "returns"):
        data.batch[name] = torch.zeros_like(data.batch["token_level_rewards"])
    for name, tensor in part.batch.items():
        whole = data.batch[name].clone()
        whole[at] = tensor.to(whole.dtype)
        data.batch[name] = whole
    for name, column in part.non_tensor_batch.items():
        whole_column = data.non_tensor_batch[name].copy()
        whole_column[rows] = column
        data.non_tensor_batch[name] = whole_column
    if "global_token_num" in data.meta_info:
        data.meta_info["global_token_num"] = data.batch["attention_mask"].sum(dim=-1).tolist()
    data.batch["response_mask"] = data.batch["response_mask"] * ~out.unsqueeze(1)
    if "reward_baselines" in data.batch:
        data.batch["reward_baselines"] = data.batch["reward_baselines"].nan_to_num()
    return data
