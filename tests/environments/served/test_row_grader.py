"""Grading by a real reward manager in a child process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from served_episodes import QUESTION, row_file, workspace_row

from verl_tool.environments.served.row_grader import RowGrader
from verl_tool.environments.served.task_rows import TaskRows
from verl_tool.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MANAGER = """
import re, time
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade, GraderFault

class Odd(GradingRewardManager):
    async def grade(self, sample):
        if sample.answer == "fault":
            raise GraderFault("no judge")
        if sample.answer == "hang":
            time.sleep(3600)
        return Grade(float(sample.ground_truth in sample.text), False)
"""


async def test_a_manager_grades_turns_and_its_failures_have_no_reward(tmp_path: Path):
    manager = tmp_path / "odd.py"
    manager.write_text(MANAGER)
    rows = TaskRows(row_file(tmp_path, QUESTION))
    grader = RowGrader(str(manager), seconds=4.0)
    try:
        await grader.start(rows)
        [row] = rows.rows
        assert (await grader.grade(row, ["first 42", "then nothing"])).reward == 1.0
        assert (await grader.grade(row, ["17"])).reward == 0.0
        fault = await grader.grade(row, ["fault"])
        assert (fault.reward, "no judge" in fault.failure) == (None, True)
        hung = await grader.grade(row, ["hang"])
        assert (hung.reward, hung.failure) == (0.0, ""), "as an empty answer: the policy wrote what hangs"
    finally:
        began = time.monotonic()
        await grader.close()
        assert time.monotonic() - began < 10


async def test_rows_that_nothing_grades_are_rejected(tmp_path: Path):
    with pytest.raises(ConfigError, match="--reward_manager"):
        await RowGrader().start(TaskRows(row_file(tmp_path, QUESTION)))
    await RowGrader().start(TaskRows(row_file(tmp_path, workspace_row())))
    with pytest.raises(ConfigError, match="is not a reward manager"):
        await RowGrader("gms8k").start(TaskRows(row_file(tmp_path, QUESTION)))
