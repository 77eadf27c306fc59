"""Values of turns: means of what could be scored, and their standard errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

pytest.importorskip("verl")

from stored_runs import trajectory

from eval_service.evaluation.dataset import Problem
from verl_tool.replay.branch.branch_point import BranchPoint, RecordLocation
from verl_tool.replay.branch.branch_values import Mean, estimate_turn_value
from verl_tool.replay.branch.branches import Branch

MADE = trajectory(0, "Buy.", [("Result=1", "")], None)
POINT = BranchPoint(RecordLocation("step_1.jsonl", 1), MADE, Problem(0, (), "sums", {}), 1)


def branch(score: float | None) -> Branch:
    return Branch(POINT, replace(MADE, reward=score), None if score is None else score > 0.5)


def test_the_mean_and_its_standard_error() -> None:
    assert Mean.of([1.0, 0.0, 0.0, 1.0]) == Mean(0.5, pytest.approx(math.sqrt(1 / 3) / 2))  # type: ignore[arg-type]
    assert (str(Mean.of([])), str(Mean.of([1.0])), str(Mean.of([1.0, 1.0]))) == ("–", "1.000", "1.000 ± 0.000")


def test_what_has_no_score_is_counted_and_not_averaged() -> None:
    value = estimate_turn_value(2, [branch(0.8), branch(0.2), branch(None)])
    assert (value.turn, value.samples, value.unscored) == (2, 2, 1)
    assert (value.score.value, value.success.value) == (pytest.approx(0.5), 0.5)
    assert value.to_json()["success"] == {"value": 0.5, "error": pytest.approx(0.5)}
    assert estimate_turn_value(1, [branch(None)]).score.value is None
