"""Branches are stored whole or not at all, behind those that are there."""

from __future__ import annotations

import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("verl")

from stored_runs import trajectory

from verl_tool.agent_loop.trajectory import read_jsonl
from verl_tool.errors import ConfigError
from verl_tool.replay.branch import branch_files
from verl_tool.replay.branch.branch_files import add_branches, branches_path, values_path, write_values
from verl_tool.replay.branch.branch_point import RecordLocation
from verl_tool.replay.branch.branch_values import estimate_turn_value

LOCATION = RecordLocation("step_3.jsonl", 17)


def test_a_branch_of_a_branch_is_named_for_both(tmp_path: Path) -> None:
    assert branches_path(tmp_path, LOCATION) == tmp_path / "branches/step_3.17.jsonl"
    deeper = RecordLocation("branches/step_3.17.jsonl", 2)
    assert branches_path(tmp_path, deeper) == tmp_path / "branches/step_3.17.2.jsonl"
    assert values_path(tmp_path, deeper) == tmp_path / "branches/step_3.17.2.values.json"


def test_lines_of_many_writers_are_all_there(tmp_path: Path) -> None:
    made = [trajectory(i, "Buy.", [(f"Result={i}", "")], None) for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        lines = list(pool.map(lambda each: add_branches(tmp_path, LOCATION, [each, each]), made))
    stored = list(read_jsonl(branches_path(tmp_path, LOCATION)))
    assert len(stored) == 24
    for each, numbers in zip(made, lines, strict=True):
        assert [stored[number - 1] for number in numbers] == [each, each]
    assert os.listdir(tmp_path / "branches") == ["step_3.17.jsonl"]


def test_a_folder_that_is_held_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch_files, "LOCK_SECONDS", 0.2)
    (tmp_path / "branches").mkdir()
    handle = os.open(tmp_path / "branches", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"for 0\.2 s"):
            add_branches(tmp_path, LOCATION, [trajectory(0, "Buy.", [], None)])
    finally:
        os.close(handle)
    assert os.listdir(tmp_path / "branches") == []


def test_values_are_replaced(tmp_path: Path) -> None:
    for model in ("a", "b"):
        path = write_values(tmp_path, LOCATION, [estimate_turn_value(1, [])], model)
    told = json.loads(path.read_text())
    assert (told["file"], told["line"], told["model"], told["turns"][0]["turn"]) == ("step_3.jsonl", 17, "b", 1)
