"""Rewards that constant answers earn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from doctor_setups import row

from verl_tool.agent_loop.trajectory import RAISES_ON_EMPTY
from verl_tool.agent_workers.reward_manager.grading.manager_process import GradedCase, GradingCase
from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.reward import (
    CONSTANTS,
    ROWS,
    constant_answers,
    constant_cases,
    decides_correctness,
    gold_cases,
    most_frequent_gold,
)
from verl_tool.checks.setup import Row

Manager = Callable[[str, str], float]
"""From an answer and the gold answer to the score."""


def rows_of(*golds: str) -> list[Row]:
    return [Row(f"row {i}", row(gold=gold)) for i, gold in enumerate(golds)]


def graded(cases: Sequence[GradingCase], manager: Manager, tells_acc: bool = True) -> list[GradedCase]:
    scores = [manager(case.answer.segments[0][1], str(case.row["ground_truth"])) for case in cases]
    return [
        GradedCase(score, float(score > 0.5), extra={"acc": float(score > 0.5)} if tells_acc else {})
        for score in scores
    ]


def findings(manager: Manager, *golds: str, tells_acc: bool = True) -> list[Finding]:
    cases = [*constant_cases(rows_of(*golds)), *gold_cases(rows_of(*golds))]
    return list(constant_answers(cases, graded(cases, manager, tells_acc)))


GOLDS = ("72", "Danube", "blue", "13", "left")


def exact(answer: str, gold: str) -> float:
    return float(gold in answer)


def generous(answer: str, gold: str) -> float:
    """Pays for any box."""
    return float("\\boxed" in answer or gold in answer)


def test_a_manager_that_looks_at_the_answer_is_no_finding() -> None:
    assert not findings(exact, *GOLDS)
    assert not findings(exact, *GOLDS, tells_acc=False)


def test_a_constant_answer_that_is_always_right_is_an_error() -> None:
    [finding] = findings(generous, *GOLDS)
    assert finding.severity is Severity.ERROR
    assert "'\\\\boxed{0}' scores like a right one on 5 of 5 rows" in finding.what
    assert "redteam" in finding.remedy


def test_a_manager_that_tells_no_acc_is_judged_by_the_score_of_the_gold_answer() -> None:
    [finding] = findings(generous, *GOLDS, tells_acc=False)
    assert finding.severity is Severity.WARNING
    assert not findings(lambda answer, gold: 0.1 + 0.9 * exact(answer, gold), *GOLDS, tells_acc=False)


def test_a_constant_answer_that_is_right_on_some_rows_is_a_warning() -> None:
    [finding] = findings(lambda a, g: float(g in a or (a == "" and g in GOLDS[:2])), *GOLDS)
    assert finding.severity is Severity.WARNING
    assert "the answer '' scores like a right one on 2 of 5 rows" in finding.what
    assert not findings(lambda a, g: float(g in a or (a == "" and g == "72")), *GOLDS)


def test_an_answer_that_is_the_gold_of_its_row_is_no_wonder() -> None:
    assert all(each.severity is Severity.WARNING for each in findings(exact, "0", "1", "2"))


def test_each_gold_is_tried_once() -> None:
    cases = constant_cases(rows_of("a", "b", "a", *map(str, range(50))))
    assert len(cases) == ROWS * len(CONSTANTS)
    assert not constant_cases([Row("row 0", {"prompt": []})])


def test_golds_are_needed_only_where_the_manager_does_not_tell_what_is_right() -> None:
    cases = constant_cases(rows_of(*GOLDS))
    assert decides_correctness(graded(cases, exact))
    assert not decides_correctness(graded(cases, exact, tells_acc=False))


def test_a_manager_that_raises_on_what_it_cannot_read_is_an_error() -> None:
    cases = [*constant_cases(rows_of(*GOLDS)), *gold_cases(rows_of(*GOLDS))]
    graded = [
        GradedCase(1.0)
        if "boxed" in case.answer.segments[0][1]
        else GradedCase(failure=f"IndexError ({RAISES_ON_EMPTY})")
        for case in cases
    ]
    finding = next(iter(constant_answers(cases, graded)))
    assert finding.severity is Severity.ERROR
    assert "raises on" in finding.what
    assert "score of a wrong answer" in finding.remedy


def test_a_manager_that_only_is_slow_is_no_finding() -> None:
    cases = constant_cases(rows_of(*GOLDS))
    assert not list(constant_answers(cases, [GradedCase(failure="hangs: no end within 4 s")] * len(cases)))


@pytest.mark.parametrize(
    ("failure", "severity"),
    [
        ("grader: Mine: the server is gone", Severity.ERROR),
        (f"grader: Mine: KeyError: 'x' ({RAISES_ON_EMPTY})", Severity.ERROR),
        (f"grader: Mine: 'CodePoints' object has no attribute 'encode' ({RAISES_ON_EMPTY})", Severity.WARNING),
        ("crashes: KeyError: 'uid'", Severity.WARNING),
    ],
)
def test_a_manager_that_fails_on_plain_answers_is_an_error_unless_the_check_may_be_why(
    failure: str, severity: Severity
) -> None:
    cases = constant_cases(rows_of(*GOLDS))
    [finding] = constant_answers(cases, [GradedCase(failure=failure)] * len(cases))
    assert finding.severity is severity
    assert failure in finding.what
    assert ("what this check lacks" in finding.remedy) == (severity is Severity.WARNING)


def test_answers_that_there_was_no_time_for_are_not_judged() -> None:
    cases = constant_cases(rows_of(*GOLDS))
    assert not list(constant_answers(cases, []))


def test_the_most_frequent_gold_is_told_by_its_share() -> None:
    assert not list(most_frequent_gold(rows_of(*GOLDS)))
    [note] = most_frequent_gold(rows_of(*["yes", "no", "yes"] * 4))
    assert note.severity is Severity.NOTE
    assert "'yes' is that of 8 of 12 rows" in note.what
    assert not list(most_frequent_gold(rows_of("yes", "no", "yes")))
    [warning] = most_frequent_gold(rows_of(*["yes"] * 10))
    assert warning.severity is Severity.WARNING


def test_an_answer_that_is_a_workspace_has_no_constants() -> None:
    content = {**row(gold="{}"), "reward_model": {"style": "workspace_verifier", "ground_truth": "{}"}}
    assert not constant_cases([Row("row 0", content)])
