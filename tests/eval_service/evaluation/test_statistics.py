"""Estimators against what they estimate."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_service.evaluation.statistics import estimate, pass_at_k


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(drawn: tuple[int, int, int]) -> None:
    n, right, k = drawn
    answers = [i < right for i in range(n)]
    draws = list(itertools.combinations(answers, k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased() -> None:
    rng, p, n, k = random.Random(0), 0.3, 6, 3
    values = [pass_at_k(n, sum(rng.random() < p for _ in range(n)), k) for _ in range(20_000)]
    assert math.fsum(values) / len(values) == pytest.approx(1 - (1 - p) ** k, abs=0.01)


@pytest.mark.parametrize(("n", "right", "k"), [(2, 1, 3), (2, 1, 0), (2, 3, 1), (2, -1, 1)])
def test_what_cannot_be_is_refused(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="answers"):
        pass_at_k(n, right, k)


def test_wilsons_interval_of_a_known_example() -> None:
    # 81 right of 263: the example of R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    interval = estimate([1.0] * 81 + [0.0] * 182)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.2553, 0.3662)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_the_interval_holds_the_mean_and_stays_within_0_and_1(values: list[float]) -> None:
    interval = estimate(values)
    assert 0.0 <= interval.low <= interval.value <= interval.high <= 1.0


def test_all_right_is_not_taken_for_certain() -> None:
    interval = estimate([1.0] * 20)
    assert interval.value == interval.high == 1.0
    assert 0.8 < interval.low < 0.9
    assert estimate([1.0] * 2000).low > 0.99


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, p, n = random.Random(1), 0.8, 50
    intervals = [estimate([float(rng.random() < p) for _ in range(n)]) for _ in range(4000)]
    covered = sum(interval.low <= p <= interval.high for interval in intervals) / len(intervals)
    assert 0.93 < covered < 0.97


def test_no_problems_tell_nothing() -> None:
    interval = estimate([])
    assert math.isnan(interval.value)
    assert (interval.low, interval.high) == (0.0, 1.0)
