"""Records survive the file, and a file that was broken off."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_service.evaluation.record import Record, read_records, write_records
from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory
from verl_tool.errors import ConfigError

TRAJECTORY = Trajectory(
    "t", (Segment(Author.PROMPT, (1,)), Segment(Author.MODEL, (2, 3), (-0.5, float("-inf")), "é")), StopReason.ANSWERED
)
RECORD = Record(3, 1, "abc", "é\n", "stop", "answered", {"prompt_tokens": 3}, 0.5, TRAJECTORY)


@given(st.text(), st.none() | st.floats(allow_nan=False), st.none() | st.booleans())
def test_a_record_comes_back_as_it_was(text: str, score: float | None, correct: bool | None) -> None:
    text = text.encode("utf-8", "replace").decode()
    record = Record(0, 0, "d", text, error=text or None, score=score, correct=correct)
    line = record.to_json()
    assert "\n" not in line
    assert type(record)(**vars(record)) == record


def test_records_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_records(path, [RECORD, RECORD.with_score(1.0, True, {"answered": 1.0})])
    first, second = read_records(path)
    assert first == RECORD
    assert (second.score, second.correct, second.details) == (1.0, True, {"answered": 1.0})
    assert not first.scored
    assert second.scored


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    line = RECORD.to_json()
    path.write_text(f"{line}\n{line}\n{line[:40]}")
    assert list(read_records(path)) == [RECORD, RECORD]


def test_another_bad_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(f"rubbish\n{RECORD.to_json()}\n")
    with pytest.raises(ConfigError, match=r"records\.jsonl:1 is no record"):
        list(read_records(path))


def test_no_file_holds_no_records(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "none.jsonl")) == []
