"""Metrics of tools, and the records that they are made from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("omegaconf")

from solved_trajectories import faulted, solved

from verl_tool.agent_loop.trajectory import read_jsonl
from verl_tool.trainer.ppo.graded_trajectories import TooManyFaultsError
from verl_tool.trainer.ppo.rollout_log import Rewards, RolloutLog
from verl_tool.trainer.ppo.tool_metrics import tool_metrics


def test_calls_are_told_by_tool():
    metrics = tool_metrics([solved(), faulted()])
    assert metrics["agent/tool/SimpleCalculatorTool/calls"] == 2
    assert metrics["agent/tool/SimpleCalculatorTool/faults"] == 0.5
    assert metrics["agent/tool/SimpleCalculatorTool/seconds_max"] == 2.0
    assert metrics["agent/tool/submit/calls"] == 1
    assert metrics["agent/turns/mean"] == 1.5
    assert metrics["agent/faulted"] == 0.5
    assert metrics["agent/fault/unreachable"] == 0.5
    assert metrics["agent/stop/tool_done"] == 0.5
    assert metrics["agent/model_tokens/mean"] == 2.5
    assert metrics["agent/observation_tokens/mean"] == 0.5


def test_an_action_without_a_call_counts_for_no_tool():
    trajectory = solved()
    metrics = tool_metrics([replace(trajectory, calls=(replace(trajectory.calls[0], names=()),))])
    assert metrics["agent/tool/none/calls"] == 1


def test_broken_calls_and_rewards_are_told_as_far_as_there_are_any():
    trajectory = solved()
    garbled = replace(trajectory, calls=(replace(trajectory.calls[0], valid=False),), reward=0.0)
    silent = replace(trajectory, calls=(), reward=0.25)
    metrics = tool_metrics([replace(trajectory, reward=1.0), garbled, faulted(), silent])
    assert metrics["agent/tool_calls/broken"] == 0.25
    assert metrics["agent/tool_calls/faults"] == 0.25
    assert metrics["agent/reward/with_calls"] == 0.5
    assert metrics["agent/reward/without_calls"] == 0.25
    assert not {name for name in tool_metrics([replace(silent, reward=None)]) if "reward" in name or "broken" in name}


def test_a_step_leaves_one_file_with_rewards(tmp_path):
    log = RolloutLog(tmp_path / "t", limits=0.5)
    log.add([solved(), faulted()], [1.0, 0.0], 7, validation=False)
    found = list(read_jsonl(tmp_path / "t" / "step_7.jsonl"))
    assert [t.reward for t in found] == [1.0, None]
    assert found[0].extra == {"step": 7, "validate": False}
    assert found[0].segments == solved().segments
    assert log.take_metrics()["agent/faulted"] == 0.5
    assert log.take_metrics() == {}


def test_what_the_reward_manager_told_stands_in_the_record(tmp_path):
    told = Rewards(columns={"acc": np.array([1.0, np.nan]), "reward_fault": ["", "no server"], "shaping/turns": [1, 2]})
    RolloutLog(tmp_path, 1.0).add([solved("a"), solved("b")], [1.0, 0.0], 1, validation=False, grading=told)
    graded, failed = read_jsonl(tmp_path / "step_1.jsonl")
    assert graded.extra["reward_extra_info"] == {"acc": 1.0, "shaping/turns": 1}
    assert failed.extra["reward_extra_info"] == {"acc": None, "shaping/turns": 2}
    assert (graded.extra.get("reward_fault"), failed.extra["reward_fault"]) == (None, "no server")


def test_records_contain_the_versions_that_sampled_them(tmp_path):
    versions = [(2, 3), (3, 3)]
    log = RolloutLog(tmp_path, 1.0)
    log.add([solved("a"), solved("b")], [1.0, 0.0], 4, validation=False, versions=versions)
    assert [t.extra["versions"] for t in read_jsonl(tmp_path / "step_4.jsonl")] == [[2, 3], [3, 3]]


def test_records_tell_which_are_samples_of_one_prompt(tmp_path):
    log = RolloutLog(tmp_path, limits=0.5)
    for groups in (["p", "q", "p"], ["r", "s", "r"]):
        log.add(list(map(solved, groups)), None, 3, validation=False, grading=Rewards(groups=groups))
    assert [t.extra["group"] for t in read_jsonl(tmp_path / "step_3.jsonl")] == [0, 1, 0, 3, 4, 3]


def test_parts_of_one_validation_go_into_one_file(tmp_path):
    log = RolloutLog(tmp_path, limits=0.5)
    for name in ("a", "b"):
        log.add([solved(name)], None, 3, validation=True)
    assert [t.trajectory_id for t in read_jsonl(tmp_path / "validation_3.jsonl")] == ["a", "b"]
    assert log.take_validation_metrics()["val-agent/tool/submit/calls"] == 2
    assert log.take_validation_metrics() == {}
    log.add([solved("c")], None, 3, validation=True)
    assert [t.trajectory_id for t in read_jsonl(tmp_path / "validation_3.jsonl")] == ["c"]


def test_a_further_part_is_appended_whole_or_not_at_all(tmp_path):
    log, file = RolloutLog(tmp_path, limits=1.0), tmp_path / "step_3.jsonl"
    log.add([solved("a")], None, 3, validation=False)
    first = file.stat().st_ino
    log.add([solved("b")], None, 3, validation=False)
    assert file.stat().st_ino == first
    with pytest.raises(ValueError, match="Unable to serialize"):
        log.add([solved("c"), solved("d")], None, 3, validation=False, versions=[(1, 1), (1, object())])
    assert [t.trajectory_id for t in read_jsonl(file)] == ["a", "b"]


def test_most_faulted_ends_the_run_and_leaves_the_records(tmp_path):
    log = RolloutLog(tmp_path, limits=0.5)
    with pytest.raises(TooManyFaultsError, match="unreachable 2"):
        log.add([faulted("a"), faulted("b"), solved("c")], None, 1, validation=False)
    assert len(list(read_jsonl(tmp_path / "step_1.jsonl"))) == 3


def test_no_folder_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RolloutLog(None, 0.5).add([solved()], None, 1, validation=False)
    assert not list(tmp_path.iterdir())
