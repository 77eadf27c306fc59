"""Rows that tell nothing about the policy: infrastructure failed on the way to their observations or their reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LOOP_FAULT = "left_out_of_group"
"""True of a trajectory that ended in a fault or was aborted; told by the agent loop."""
REWARD_FAULT = "reward_fault"
"""Why there is no reward, or an empty string; told by verl-tool's reward managers."""


def spoilt_rows(columns: Mapping[str, Any], n: int) -> list[bool]:
    """Which of `n` rows are spoilt, by the columns that the loop and the reward manager add (either may lack)."""
    by_loop: Sequence[Any] = columns.get(LOOP_FAULT, [False] * n)
    by_reward: Sequence[Any] = columns.get(REWARD_FAULT, [""] * n)
    return [bool(loop) or bool(reward) for loop, reward in zip(by_loop, by_reward, strict=True)]
