"""Find rows that say nothing about the policy, because infrastructure failed during the rollout or the grading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_tool.agent_loop.trajectory import LOOP_FAULT, REWARD_FAULT


def invalid_rows(columns: Mapping[str, Any], n: int) -> list[bool]:
    """Return which of `n` rows are invalid, by the columns of the loop and the reward manager. Both are optional."""
    by_loop: Sequence[Any] = columns.get(LOOP_FAULT, [False] * n)
    by_reward: Sequence[Any] = columns.get(REWARD_FAULT, [""] * n)
    return [bool(loop) or bool(reward) for loop, reward in zip(by_loop, by_reward, strict=True)]


def singleton_rows(groups: Sequence[Any], valid: Sequence[bool] | np.ndarray, sampled: int = 1) -> np.ndarray:
    """Return which of the `valid` rows are the only ones left in their group. [batch]

    A group that had one row from the start has no singleton. Each group was sampled `sampled` times, or as often as it
    has rows here, since rows may be missing.
    """
    sizes = Counter(groups)
    left = Counter(group for group, is_valid in zip(groups, valid, strict=True) if is_valid)
    return np.array(
        [
            bool(is_valid) and left[group] == 1 and max(sizes[group], sampled) > 1
            for group, is_valid in zip(groups, valid, strict=True)
        ],
        dtype=bool,
    )
