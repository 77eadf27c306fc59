"""Advantages as if the trajectories that infrastructure spoilt had never been sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from verl import DataProto
from verl_tool.trainer.ppo.spoilt import spoilt_rows


def without_spoilt(compute: Callable[..., DataProto]) -> Callable[..., DataProto]:
    """verl's `compute_advantage` on the rows that count; the others get advantage and return 0.

    This holds for every estimator alike: what is normalised over a group or over the batch sees no spoilt row.
    """

    def compute_advantage(data: DataProto, *args: Any, **kwargs: Any) -> DataProto:
        spoilt = np.array(spoilt_rows(data.non_tensor_batch, len(data)))
        if not spoilt.any():
            return compute(data, *args, **kwargs)
        rows = np.flatnonzero(~spoilt)
        for name in ("advantages", "returns"):
            data.batch[name] = torch.zeros_like(data.batch["token_level_rewards"])
        if len(rows):
            counted = compute(data.select_idxs(rows), *args, **kwargs)
            for name in ("advantages", "returns"):
                data.batch[name][rows] = counted.batch[name]
        return data

    return compute_advantage
