"""A reward manager in a thread: its grades, its deadline, and nothing that it leaves behind."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

pytest.importorskip("verl")

import psutil
from omegaconf import DictConfig, OmegaConf

from verl_tool.agent_workers.reward_manager.grading.manager_process import GradingCase, ManagerAnswer
from verl_tool.agent_workers.reward_manager.grading.manager_thread import graded_in_thread

BODY = """
import asyncio
import pathlib
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade

class Manager(GradingRewardManager):
    process = None

    async def grade(self, sample):
        right = sample.answer == sample.ground_truth
        {body}
        return Grade(float(right), right)
"""
STARTS = """if self.process is None:
            self.process = await asyncio.create_subprocess_exec("sleep", "600", stdin=asyncio.subprocess.PIPE)
            pathlib.Path(__file__).with_name("pid").write_text(str(self.process.pid))"""
CASES = [GradingCase({"ground_truth": "7"}, ManagerAnswer(text, (("model", text),))) for text in ("7", "8", "9")]


def config_of(folder: Path, body: str) -> DictConfig:
    """Of a training with a manager that does `body` before it grades."""
    (folder / "manager.py").write_text(BODY.format(body=body))
    manager = {"source": "importlib", "name": "Manager", "module": {"path": str(folder / "manager.py")}}
    return OmegaConf.create({"reward": {"reward_manager": manager, "reward_kwargs": {}}})


def never(graded: object) -> bool:
    return False


def test_cases_are_graded_in_their_order_until_it_is_enough(tmp_path: Path) -> None:
    config = config_of(tmp_path, "pass")
    assert [each.acc for each in graded_in_thread(config, CASES, 30.0, never)] == [1.0, 0.0, 0.0]
    assert len(graded_in_thread(config, CASES, 30.0, lambda graded: len(graded) == 2)) == 2


def test_a_manager_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    config = config_of(tmp_path, "await asyncio.sleep(0 if right else 600)")
    began = time.monotonic()
    assert [each.acc for each in graded_in_thread(config, CASES, 1.0, never)][:1] == [1.0]
    assert time.monotonic() - began < 60


def test_what_a_manager_raises_is_a_failure_and_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        [first, *_] = graded_in_thread(config_of(tmp_path, "raise KeyError('x')"), CASES, 30.0, never)
    assert "KeyError" in first.failure
    assert not caplog.messages


def test_processes_that_it_started_are_ended(tmp_path: Path) -> None:
    assert len(graded_in_thread(config_of(tmp_path, STARTS), CASES, 30.0, never)) == 3
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
