"""Rows that tell nothing about the policy: infrastructure failed on the way to their observations or their reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_tool.agent_loop.trajectory import LOOP_FAULT, REWARD_FAULT


def invalid_rows(columns: Mapping[str, Any], n: int) -> list[bool]:
    """Which of `n` rows are invalid, by the columns that the loop and the reward manager add (either may lack)."""
    by_loop: Sequence[Any] = columns.get(LOOP_FAULT, [False] * n)
    by_reward: Sequence[Any] = columns.get(REWARD_FAULT, [""] * n)
    return [bool(loop) or bool(reward) for loop, reward in zip(by_loop, by_reward, strict=True)]


def singleton_rows(groups: Sequence[Any], counted: Sequence[bool] | np.ndarray, sampled: int = 1) -> np.ndarray:
    """Which of the `counted` rows are the only ones left of their group, one entry a row. [batch]

    A group that was of one row from the start has no lone one; each was sampled `sampled` times, or as often as it has
    rows here (rows may be missing, too).
    """
    there = Counter(groups)
    left = Counter(group for group, counts in zip(groups, counted, strict=True) if counts)
    return np.array(
        [
            bool(counts) and left[group] == 1 and max(there[group], sampled) > 1
            for group, counts in zip(groups, counted, strict=True)
        ],
        dtype=bool,
    )
