"""The metrics that a run has left in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Metrics = list[tuple[int, dict[str, float]]]
"""Step and metrics of each step, in order."""


@dataclass(frozen=True)
class Curve:
    """One metric over the steps at which it was told."""

    steps: list[int]
    values: list[float]


def metrics_files(run: Path) -> list[Path]:
    """One for each start of the run, in order: ``metrics.1.jsonl`` …, and ``metrics.jsonl`` of the last."""
    earlier = sorted(run.glob("metrics.[0-9]*.jsonl"), key=lambda path: int(path.suffixes[0][1:]))
    return [*earlier, run / "metrics.jsonl"]


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """``step`` and ``data`` of each line of a metrics file; a last line that is still being written is left out."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            if line.endswith("\n"):
                raise
            return
        yield entry


def read_metrics(run: Path) -> Metrics:
    """All starts of a run. Of a step that was made again, the last time counts.

    Raises FileNotFoundError if there are none.
    """
    told: dict[int, dict[str, float]] = {}
    for path in metrics_files(run):
        for entry in entries(path):
            told.setdefault(entry["step"], {}).update(entry["data"])
    return sorted(told.items())


def curve(metrics: Metrics, name: str) -> Curve:
    """A metric's course. Steps that do not tell it are left out."""
    told = [(step, data[name]) for step, data in metrics if name in data]
    return Curve([step for step, _ in told], [value for _, value in told])
