"""Success over several answers a problem, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054
"""Quantile 0.975 of the standard normal distribution: an interval of 95%."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, and the ends of its 95% interval. All from 0 to 1."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


def pass_at_k(answers: int, right: int, k: int) -> float:
    """The chance that at least one of `k` answers, drawn from `answers` of which `right` are right, is right.

    The unbiased estimator of Chen et al., "Evaluating Large Language Models Trained on Code", 2021 (arXiv:2107.03374),
    section 2.1: 1 - C(n - c, k) / C(n, k). Raises ValueError if `k` is not from 1 to `answers`.
    """
    if not 1 <= k <= answers:
        raise ValueError(f"pass@{k} of {answers} answers; k must be from 1 to the number of answers a problem")
    if not 0 <= right <= answers:
        raise ValueError(f"{right} of {answers} answers are right; that cannot be")
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def estimate(per_problem: Sequence[float]) -> Estimate:
    """The mean of values from 0 to 1, one a problem, with Wilson's interval over the problems.

    E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", JASA 22 (1927). It holds for
    values that are 0 or 1. For fractions (several answers a problem) it is too wide, never too narrow: of all values
    from 0 to 1 with the same mean, 0 and 1 vary most. It takes problems as drawn at random from those that matter.
    """
    n = len(per_problem)
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0)
    mean = math.fsum(per_problem) / n
    spread = Z95 * math.sqrt(max(0.0, mean * (1 - mean)) / n + Z95**2 / (4 * n**2))
    centre, scale = mean + Z95**2 / (2 * n), 1 + Z95**2 / n
    low, high = (centre - spread) / scale, (centre + spread) / scale
    # Rounding must not put the mean outside of its own interval.
    return Estimate(mean, max(0.0, min(low, mean)), min(1.0, max(high, mean)))
