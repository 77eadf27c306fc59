"""Estimate the value of a turn: the mean score of continuations from before it, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from verl_tool.replay.branch.branches import Branch


@dataclass(frozen=True)
class Mean:
    """A mean over samples, and its standard error (standard deviation divided by the root of their number)."""

    value: float | None
    """None without samples."""
    error: float | None
    """None with fewer than two samples."""

    @classmethod
    def of(cls, samples: Sequence[float]) -> Mean:
        n = len(samples)
        return cls(fmean(samples) if n else None, stdev(samples) / math.sqrt(n) if n > 1 else None)

    def __str__(self) -> str:
        if self.value is None:
            return "–"
        return f"{self.value:.3f}" + ("" if self.error is None else f" ± {self.error:.3f}")


@dataclass(frozen=True)
class TurnValue:
    """Value of the state before a turn, under the model that continues from it."""

    turn: int
    """From 1."""
    samples: int
    """Number of continuations with a score."""
    unscored: int
    """Number of those without: they ended in a fault, were aborted, or could not be graded."""
    score: Mean
    success: Mean

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate_turn_value(turn: int, branches: Sequence[Branch]) -> TurnValue:
    """Estimate the value of a turn from the branches that continue from it."""
    scores = [float(b.trajectory.reward) for b in branches if b.trajectory.reward is not None]
    successes = [float(b.correct) for b in branches if b.correct is not None]
    return TurnValue(turn, len(scores), len(branches) - len(scores), Mean.of(scores), Mean.of(successes))
