"""Metrics of a run that was started more than once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_tool.trainer.monitoring.run_metrics import Curve, curve, read_metrics


def write(path: Path, *lines: tuple[int, dict[str, float]]) -> None:
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in lines))


def test_of_a_step_that_was_made_again_the_last_time_counts(tmp_path):
    write(tmp_path / "metrics.jsonl", (3, {"reward": 0.4}))
    write(tmp_path / "metrics.2.jsonl", (2, {"reward": 0.3}), (3, {"reward": 0.1}))
    write(tmp_path / "metrics.1.jsonl", (1, {"reward": 0.1}), (2, {"reward": 0.2, "calls": 1.0}))
    write(tmp_path / "metrics.10.jsonl", (2, {"reward": 0.35}))
    metrics = read_metrics(tmp_path)
    assert curve(metrics, "reward") == Curve([1, 2, 3], [0.1, 0.35, 0.4])
    assert curve(metrics, "calls") == Curve([2], [1.0])
    assert curve(metrics, "nothing") == Curve([], [])


def test_a_step_told_in_two_lines_has_both(tmp_path):
    write(tmp_path / "metrics.jsonl", (1, {"reward": 0.1}), (1, {"val": 0.5}))
    assert read_metrics(tmp_path) == [(1, {"reward": 0.1, "val": 0.5})]


def test_a_folder_without_metrics_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path)
