"""The index beside the records says what the records say, and grows with them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import made_run, made_trajectory, write_step, write_tokens

from verl_tool.agent_loop.trajectory import Author, read_jsonl, write_jsonl
from verl_tool.viewer import record_index
from verl_tool.viewer.record_index import FOLDER, RecordIndex
from verl_tool.viewer.run_files import Run


def index_of(folder):
    index = RecordIndex(Run("run", folder))
    index.refresh()
    return index


def word(records, row, name):
    return records.words[row[name]]


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_rows_say_what_trajectories_say(tmp_path_factory, seed, many):
    draw = random.Random(seed)
    made = [made_trajectory(draw.randrange(4), i, draw.randrange(9), draw) for i in range(many)]
    path = tmp_path_factory.mktemp("records") / "some.jsonl"
    write_jsonl(path, made)
    index = RecordIndex(Run("some", path.parent, path))
    index.refresh()
    records = index.records
    assert len(records.rows) == len(made)
    for row, trajectory in zip(records.rows, made, strict=True):
        assert row["model_tokens"] == sum(trajectory.response_mask)
        assert row["tool_tokens"] == len(trajectory.response_ids) - sum(trajectory.response_mask)
        assert row["prompt_tokens"] == len(trajectory.prompt_ids)
        assert row["turns"] == sum(s.author is Author.MODEL for s in trajectory.segments)
        assert word(records, row, "stop") == trajectory.stop.value
        assert word(records, row, "tools") == ",".join(trajectory.calls[0].names)
        assert word(records, row, "fault") == (trajectory.fault.kind.value if trajectory.fault else "")
        assert math.isnan(row["reward"]) if trajectory.reward is None else row["reward"] == trajectory.reward
        assert records.line(row) == trajectory.to_json().encode() + b"\n"


def test_the_second_time_nothing_is_read(tmp_path, monkeypatch):
    first = index_of(made_run(tmp_path / "run")).records
    assert (tmp_path / "run/trajectories" / FOLDER / "step_1.rows").is_file()

    def refuse(*_):
        raise AssertionError("a line was read again")

    monkeypatch.setattr(record_index.RowReader, "read", refuse)
    again = index_of(tmp_path / "run").records
    assert again.rows.tobytes() == first.rows.tobytes()
    assert again.words == first.words
    assert again.tools == first.tools


def test_a_run_that_goes_on_is_followed(tmp_path):
    folder = made_run(tmp_path / "run", steps=2)
    index = index_of(folder)
    before = index.records
    assert not index.refresh()
    write_step(folder, 3, 2, 2, random.Random(1))
    assert index.refresh()
    assert len(index.records.rows) == len(before.rows) + 4
    assert index.records.version > before.version


def test_a_line_that_is_being_written_waits(tmp_path):
    folder = made_run(tmp_path / "run", steps=1, problems=2, samples=1)
    path = folder / "trajectories/step_1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    index = index_of(folder)
    assert len(index.records.rows) == 1
    assert index.records.missing_bytes > 0
    path.write_bytes(whole)
    index.refresh()
    assert len(index.records.rows) == 2
    assert index.records.missing_bytes == 0


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    folder = made_run(tmp_path / "run", steps=1)
    index_of(folder)
    write_step(folder, 1, 9, 9, random.Random(5))
    records = index_of(folder).records
    assert len(records.rows) == 81
    told = list(read_jsonl(folder / "trajectories/step_1.jsonl"))
    assert [row["model_tokens"] for row in records.rows] == [sum(t.response_mask) for t in told]


@pytest.mark.parametrize("line", [b"{", b"[]", b'"text"', b"\xff\xfe", b'{"segments": 5}', b"[" * 100_000])
def test_a_line_that_is_no_record_is_a_row_that_says_so(tmp_path, line):
    path = tmp_path / "step_1.jsonl"
    path.write_bytes(line + b"\n")
    records = index_of(tmp_path).records
    assert [word(records, row, "stop") for row in records.rows] == ["unreadable"]


def test_where_the_records_may_not_be_changed_the_index_lies_elsewhere(tmp_path):
    folder = made_run(tmp_path / "run", steps=1)
    index = RecordIndex(Run("run", folder), tmp_path / "elsewhere")
    index.refresh()
    assert not (folder / "trajectories" / FOLDER).exists()
    assert len(list((tmp_path / "elsewhere").rglob("step_1.rows"))) == 1


def test_advantages_come_when_the_trainer_has_written_them(tmp_path):
    folder = made_run(tmp_path / "run", steps=2)
    index = index_of(folder)
    assert np.isnan(index.records.rows["advantage"]).all()
    write_tokens(folder, 2)
    assert index.refresh()
    for records in (index.records, index_of(folder).records):
        second = records.rows[records.rows["step"] == 2]
        assert np.array_equal(second["advantage"], np.where(second["reward"] == 1, 1, -1))
        assert np.isnan(records.rows["advantage"][records.rows["step"] == 1]).all()
    assert not index.refresh()


def test_records_of_an_evaluation(tmp_path):
    from eval_service.evaluation.record import Record, write_records

    trajectory = made_trajectory(3, 0, 8, random.Random(2))
    records = [
        Record(3, 0, "d", "7", "stop", "answered", {}, 1.5, trajectory, score=0.25, correct=False),
        Record(4, 1, "d", error="timed out"),
    ]
    write_records(tmp_path / "records.jsonl", records)
    found = index_of(tmp_path).records
    assert found.rows["reward"][0] == 0.25
    assert found.rows["correct"][0] == 0
    assert list(found.rows["index"]) == [3, 4]
    assert word(found, found.rows[0], "stop") == "answered"
    assert word(found, found.rows[1], "fault") == "no answer"
