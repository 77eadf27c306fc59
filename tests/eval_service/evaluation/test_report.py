"""Figures of hand-made records."""

from __future__ import annotations

import pytest

from eval_service.evaluation.record import Record
from eval_service.evaluation.report import as_markdown, summarise
from verl_tool.agent_loop.trajectory import Author, CallRecord, Segment, StopReason, Trajectory


def record(index: int, sample: int, correct: bool | None, error: str | None = None, calls: int = 0) -> Record:
    trajectory = Trajectory(
        "t",
        (Segment(Author.PROMPT, (1,)), Segment(Author.MODEL, (2,))),
        StopReason.ANSWERED,
        calls=tuple(
            CallRecord(i, "<python>1</python>", valid=i == 0, seconds=0.5, names=("python",)) for i in range(calls)
        ),
    )
    usage = {"prompt_tokens": 10, "completion_tokens": 20, "tool_tokens": 6}
    score = None if correct is None else float(correct)
    return Record(
        index, sample, "d", error=error, correct=correct, score=score, usage=usage, stop_reason="answered",
        seconds=2.0, trajectory=trajectory,
    )  # fmt: skip


RECORDS = [
    record(0, 0, True, calls=2),
    record(0, 1, False),
    record(1, 0, False, calls=1),
    record(1, 1, False),
    record(2, 0, None, error="it broke"),
    record(2, 1, None),
]


def test_what_has_no_score_counts_neither_as_right_nor_as_wrong() -> None:
    summary = summarise(RECORDS, problems=3, samples=2, ks=[1, 2])
    assert (summary.answers, summary.errors, summary.unscored) == (4, 1, 1)
    assert summary.accuracy.value == 0.25
    assert summary.mean_score == 0.25
    assert summary.passes[1].value == 0.25
    assert summary.passes[2].value == 0.5


def test_tools_and_tokens_are_counted() -> None:
    summary = summarise(RECORDS, problems=3, samples=2, ks=[1])
    tool = summary.tools["python"]
    assert (tool.calls, tool.invalid, tool.answers, tool.seconds) == (3, 1, 2, 1.5)
    assert summary.tokens == {"prompt": 10, "model": 20, "tool": 6}
    assert summary.stops == {"answered": 5}


def test_the_page_tells_the_figures() -> None:
    page = as_markdown(summarise(RECORDS, problems=3, samples=2, ks=[2]), "calculator")
    assert "| avg@2 | 25.0% [" in page
    assert "| pass@2 | 50.0% [" in page
    assert "| answers scored | 4 of 6 |" in page
    assert "| errors, without score | 1, 1 |" in page
    assert "| python | 3 | 0.75 | 1 | 2 | 0.5000 |" in page


def test_a_k_above_the_number_of_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@3"):
        summarise(RECORDS, problems=3, samples=2, ks=[3])
