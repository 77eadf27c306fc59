"""Seconds by phase, read from metrics as verl writes them."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from verl_tool.trainer.monitoring.time_by_phase import phase_table, time_by_phase


def write(path, *data) -> None:
    path.write_text("".join(json.dumps({"step": i, "data": d}) + "\n" for i, d in enumerate(data)))


@pytest.fixture
def run(tmp_path):
    step = {"timing_s/gen": 4.0, "timing_s/update_actor": 2.0, "timing_s/update_weights": 1.0, "timing_s/step": 8.0}
    write(tmp_path / "metrics.1.jsonl", {"timing_s/setup": 30.0, "timing_s/testing": 3.0}, step)
    write(tmp_path / "metrics.jsonl", {"timing_s/setup": 20.0}, step | {"timing_s/testing": 3.0, "agent/tool": 9.0})
    return tmp_path


def test_phases_of_all_starts_add_up(run):
    assert time_by_phase(run) == {
        "set-up": 50.0,
        "rollout": 8.0,
        "update": 4.0,
        "weight sync": 2.0,
        "validation": 6.0,
        "other": 2.0,
    }


def test_the_table_tells_shares(run):
    console = Console(file=io.StringIO(), width=80)
    console.print(phase_table(run))
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["│", "set-up", "│", "50.0", "│", "69%", "│"] in rows
    assert ["│", "all", "│", "72.0", "│", "│"] in rows


def test_a_folder_without_metrics(tmp_path):
    with pytest.raises(FileNotFoundError):
        time_by_phase(tmp_path)
