"""Calls that die out in a training, and the cause that the metrics tell."""

from __future__ import annotations

import pytest

from verl_tool.trainer.monitoring.tool_use_collapse import (
    BROKEN,
    CALLS,
    FAULTS,
    LIMITS,
    STEPS,
    WITH_CALLS,
    WITHOUT_CALLS,
    ToolUseCollapse,
)

GONE = (0.1,) * STEPS


def told(*calls: float | None, **others: float) -> list[tuple[int, str]]:
    """What is said of steps with so many calls a trajectory, and at which."""
    watch = ToolUseCollapse(0.1)
    names = {"broken": BROKEN, "faults": FAULTS, "with_calls": WITH_CALLS, "without": WITHOUT_CALLS, "cut": LIMITS[0]}
    more = {names[name]: value for name, value in others.items()}
    steps = [{} if value is None else {CALLS: value, **more} for value in calls]
    said = [(number, watch.check(metrics, number)) for number, metrics in enumerate(steps, 1)]
    return [(number, line) for number, line in said if line is not None]


def cause(**others: float) -> str:
    [(_, line)] = told(2.0, *GONE, **others)
    return line.partition("Likely cause: ")[2]


def test_it_is_said_once_and_only_behind_some_steps() -> None:
    [(step, line)] = told(1.0, 2.0, *GONE, 0.0, 3.0, *GONE)
    assert step == 2 + STEPS
    assert "0.1 a trajectory" in line
    assert "below 0.1 of their highest mean, 2 in step 2 (metric_limits.tool_calls_share)" in line


@pytest.mark.parametrize(
    "calls",
    [
        (2.0, *GONE[1:], 0.2, *GONE[1:]),
        (0.0,) * 10,
        (0.3, 0.2, 0.1, 0.05, 0.05, 0.05),
        (2.0, *GONE[1:], None, None),
    ],
    ids=["back in between", "there never were any", "still above the share", "steps without metrics"],
)
def test_it_is_not_said_of_others(calls: tuple[float | None, ...]) -> None:
    assert not told(*calls)


def test_the_share_of_broken_calls_is_that_of_the_calls_since_the_peak() -> None:
    watch = ToolUseCollapse(0.1)
    watch.check({CALLS: 1.0, BROKEN: 1.0}, 1)  # before the peak
    watch.check({CALLS: 3.0, BROKEN: 0.5}, 2)
    watch.check({CALLS: 1.0, BROKEN: 0.1}, 3)
    lines = [watch.check({CALLS: 0.0}, 4 + i) for i in range(STEPS)]
    assert "Since then 40% of the calls was broken" in str(lines[-1])


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"faults": 0.5, "broken": 0.4}, "50% of the calls ended in a fault"),
        ({"faults": 0.1, "broken": 0.6, "cut": 0.9}, "they cannot be read or name no tool"),
        ({"broken": 0.1, "cut": 0.6, "with_calls": 0.0, "without": 1.0}, "a limit ended 60% of the trajectories"),
        ({"cut": 0.1, "with_calls": 0.2, "without": 0.5}, "with calls had 0.2 in the mean, those without 0.5"),
        ({"with_calls": 0.5, "without": 0.2}, "none that the metrics tell"),
        ({}, "none that the metrics tell"),
    ],
)  # fmt: skip
def test_the_likely_cause_follows_from_the_metrics(metrics: dict[str, float], words: str) -> None:
    assert words in cause(**metrics)


def test_without_a_metric_of_broken_calls_their_share_is_unknown() -> None:
    [(_, line)] = told(2.0, *GONE)
    assert "an unknown share of the calls was broken" in line
