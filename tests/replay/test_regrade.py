"""Stored trajectories are scored as in the training, and what is scored otherwise is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from stored_runs import replay, stored_run, trajectory, write_rows

from eval_service.evaluation.record import Record, write_records
from verl_tool.agent_loop.trajectory import Excluded, Trajectory

ROWS = [("What is 13.1-3?", "10.1"), ("What is 2+2?", "4"), ("What is 2+2? Tell.", "4")]
CALL = ("<calculator>13.1-3</calculator>", "\n<result>10.1</result>\n")
LENIENT = """
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade

class Lenient(GradingRewardManager):
    async def grade(self, sample):
        return Grade(2.0, True)
"""


def graded(index: int, answer: str, reward: float | None, **changes: Any) -> Trajectory:
    told = {} if reward is None else {"acc": float(reward > 0.5), "base_score": reward, "answered": 1.0}
    return trajectory(index, ROWS[index][0], [CALL, (answer, "")], reward, **told | changes)


LINES = [graded(0, "Result=10.1", 1.0), graded(0, "Result=9", 0.0), graded(1, "Result=4", 1.0)]


def test_a_run_that_is_scored_as_it_was_is_all_right(tmp_path: Path) -> None:
    run = stored_run(tmp_path, ROWS, [*LINES, graded(2, "Result=5", 0.0, curiosity_bonus=None)])
    result = replay(run, "--regrade")
    assert result.exit_code == 0, result.output
    assert "4 trajectories graded again, 0 differ; mean score 0.5000, now 0.5000" in result.output


def test_a_score_that_changed_is_told_with_its_cause_and_may_be_accepted(tmp_path: Path) -> None:
    run = stored_run(tmp_path, ROWS, [*LINES, graded(1, "Result=4", 0.0), graded(2, "Result=4", 0.0)])
    result = replay(run, "--regrade", "--output", tmp_path / "changes.jsonl")
    assert result.exit_code == 1
    assert "score 0 -> 1; acc 0 -> 1; base_score 0 -> 1" in result.output
    assert "step_1.jsonl:4" in result.output
    assert "Result=4" in result.output
    told = [json.loads(line) for line in (tmp_path / "changes.jsonl").read_text().splitlines()]
    assert [(each["where"], each["was"], each["now"]) for each in told] == [
        ("step_1.jsonl:4", 0.0, 1.0),
        ("step_1.jsonl:5", 0.0, 1.0),
    ]
    assert replay(run, "--regrade", "--accept", tmp_path / "changes.jsonl").exit_code == 0


def test_another_reward_is_asked_for_and_so_are_its_differences(tmp_path: Path) -> None:
    run = stored_run(tmp_path, ROWS, LINES)
    (tmp_path / "lenient.py").write_text(LENIENT)
    result = replay(run, "--regrade", "--reward_manager", tmp_path / "lenient.py")
    assert result.exit_code == 0, result.output
    assert "3 differ; mean score 0.6667, now 2.0000" in result.output
    options = replay(run, "--regrade", "--reward_kwargs", '{"wrong": -1}')
    assert options.exit_code == 0
    assert "1 differ" in options.output


def test_a_trajectory_that_loses_its_score_is_never_asked_for(tmp_path: Path) -> None:
    run = stored_run(tmp_path, [("What is 13.1-3?", "ten"), *ROWS[1:]], LINES)
    result = replay(run, "--regrade", "--reward_kwargs", '{"wrong": -1}')
    assert result.exit_code == 1
    assert "is not a number" in result.output
    assert "2 without a score" in result.output


def test_what_a_training_left_ungraded_stays_so(tmp_path: Path) -> None:
    lone = replace(graded(1, "Result=4", 1.0), excluded=Excluded.SINGLETON)
    aborted = replace(graded(1, "Result=4", None), excluded=Excluded.ABORTED)
    result = replay(stored_run(tmp_path, ROWS, [lone, aborted]), "--regrade")
    assert result.exit_code == 0
    assert "1 trajectories graded again" in result.output
    assert "1 ended in a fault" in result.output


def test_a_row_that_asks_something_else_is_not_taken_for_the_trajectorys(tmp_path: Path) -> None:
    run = stored_run(tmp_path, [("Another question", "10.1"), *ROWS[1:]], LINES)
    result = replay(run, "--regrade")
    assert result.exit_code == 1
    assert "no row in the data for: step_1.jsonl:1, step_1.jsonl:2" in result.output


def test_an_evaluation_is_graded_with_the_reward_of_its_run(tmp_path: Path) -> None:
    run, folder = stored_run(tmp_path, ROWS, LINES), tmp_path / "evaluation"
    folder.mkdir()
    records = [
        Record(0, 0, "", trajectory=LINES[0], score=1.0, correct=True, details={"acc": 1.0}),
        Record(1, 0, "", content="Result=4", score=0.0, correct=False, details={"acc": 0.0}),
        Record(2, 0, "", error="no answer"),
    ]
    write_records(folder / "records.jsonl", records)
    write_rows(tmp_path / "test.jsonl", ROWS)
    assert "give their file: --data" in replay(folder, "--regrade", "--reward_manager", "calculator").output
    for reward in (("--reward_manager", "calculator"), ("--from_run", run)):
        result = replay(folder, "--regrade", "--data", tmp_path / "test.jsonl", *reward)
        assert result.exit_code == (0 if "--reward_manager" in reward else 1), result.output  # one asks for another
        assert "2 trajectories graded again, 1 differ" in result.output


def test_what_cannot_be_done_is_told(tmp_path: Path) -> None:
    run = stored_run(tmp_path, ROWS, LINES)
    for arguments, told in (
        ((), "nothing to do"),
        (("--regrade", "--files", "step_7*"), "no trajectories in"),
        (("--regrade", "--reward_kwargs", "[1]"), "no JSON object"),
        (("--regrade", "--reward_manager", "nobody"), "cannot be made"),
        (("--regrade", "--data", "nowhere.jsonl"), "is no file"),
    ):
        result = replay(run, *arguments)
        assert result.exit_code == 2
        assert told in " ".join(result.output.split())


def test_a_question_of_two_data_sets_is_the_one_s_that_the_record_tells(tmp_path: Path) -> None:
    asked = graded(0, "Result=10.1", 1.0)
    told = replace(asked, extra=asked.extra | {"data_source": "sums"})
    run = stored_run(tmp_path, ROWS, [asked, told])
    rows = (tmp_path / "train.jsonl").read_text().splitlines()
    other = json.loads(rows[0]) | {"data_source": "others"}
    (tmp_path / "train.jsonl").write_text("\n".join([*rows, json.dumps(other)]) + "\n")
    result = replay(run, "--regrade")
    assert "1 trajectories graded again, 0 differ" in result.output
    assert "1 without a row" in result.output
    assert "step_1.jsonl:1" in result.output
