"""Read the metrics in a run's folder."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tool.errors import ConfigError
from verl_tool.util.confined_files import open_confined

_MAX_LINE = 16 << 20
"""Maximum size in bytes of one step's metrics."""
_START = re.compile(r"metrics\.(\d{1,9})\.jsonl", re.ASCII)
Metrics = list[tuple[int, dict[str, float]]]
"""Step and metrics of each step, in order."""


@dataclass(frozen=True)
class Curve:
    """One metric over the steps at which it was logged."""

    steps: list[int]
    values: list[float]


def metrics_files(run: Path) -> list[Path]:
    """Return one file per start of the run, in order: ``metrics.1.jsonl`` …, and ``metrics.jsonl`` for the last."""
    earlier = [(int(m[1]), path) for path in run.glob("metrics.*.jsonl") if (m := _START.fullmatch(path.name))]
    return [*(path for _, path in sorted(earlier)), run / "metrics.jsonl"]


def entries(path: Path, problems: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the ``step`` and ``data`` of each line of a metrics file. An incomplete last line is left out.

    Raises ConfigError for any other invalid line. If `problems` is set, such lines are left out and described there.
    """
    with open_confined(path, path.parent) as file:
        for number in itertools.count(1):
            line = file.readline(_MAX_LINE)
            if not line:
                return
            try:
                if len(line) == _MAX_LINE:
                    raise ValueError(f"more than {_MAX_LINE} bytes")
                entry = json.loads(line)
                if not (isinstance(entry["step"], int) and isinstance(entry["data"], dict)):
                    raise TypeError("no step and data")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                while len(line) == _MAX_LINE and not line.endswith(b"\n"):
                    line = file.readline(_MAX_LINE)
                if not line.endswith(b"\n"):
                    return
                problem = f"line {number} of {path} is not a step's metrics ({error}); remove it"
                if problems is None:
                    raise ConfigError(problem) from None
                problems.append(problem)
                continue
            yield entry


def read_metrics(run: Path, problems: list[str] | None = None) -> Metrics:
    """Read the metrics of all starts of a run. If a step was repeated, the last values count.

    Raises FileNotFoundError if there are no metrics. Invalid lines are handled as in `entries`.
    """
    metrics: dict[int, dict[str, float]] = {}
    for path in metrics_files(run):
        for entry in entries(path, problems):
            metrics.setdefault(entry["step"], {}).update(entry["data"])
    return sorted(metrics.items())


def curve(metrics: Metrics, name: str) -> Curve:
    """Return one metric by step. Steps without it are left out."""
    points = [(step, data[name]) for step, data in metrics if name in data]
    return Curve([step for step, _ in points], [value for _, value in points])
