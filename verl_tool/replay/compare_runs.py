"""Compare the metrics and trajectories of two runs, except for times and ids."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.table import Table

from verl_tool.errors import ConfigError

METRICS = "metrics.jsonl"
_TIMING_METRICS = re.compile(r"(^|/)(timing_s|timing_per_token_ms|perf|seconds)/|/seconds_")
"""Matches names of metrics that measure time or utilization, which differ between equal runs."""
VOLATILE_FIELDS = frozenset({"trajectory_id", "timings", "seconds"})
"""Fields of trajectories and calls that differ between equal runs."""
MAX_DISPLAY_CHARACTERS = 60


@dataclass(frozen=True)
class RunDifference:
    """A value that differs between the runs."""

    where: str
    """File, line and path of the value: ``step_1.jsonl:3 segments[2].tokens[0]``."""
    was: object
    now: object

    def to_json(self) -> str:
        return json.dumps({"where": self.where, "was": self.was, "now": self.now}, ensure_ascii=False)


@dataclass
class RunComparison:
    line_counts: dict[str, int] = field(default_factory=dict)
    """Number of compared lines, by file."""
    differences: list[RunDifference] = field(default_factory=list)
    """The first difference of each line."""
    without_row: list[str] = field(default_factory=list)

    def summary(self) -> str:
        metrics = self.line_counts.get(METRICS, 0)
        trajectories = sum(self.line_counts.values()) - metrics
        outcome = f"{len(self.differences)} differ" if self.differences else "all equal"
        return f"{metrics} lines of metrics and {trajectories} trajectories compared, {outcome}"

    def lines(self) -> list[str]:
        return [difference.to_json() for difference in self.differences]

    def unexpected_count(self, known: Collection[tuple[str, object]], *, reward_changed: bool) -> int:
        """Count the differences that are not in `known`: pairs of `where` and `now`."""
        return sum((each.where, each.now) not in known for each in self.differences)

    def tables(self, rows: int = 20) -> list[Table]:
        table = Table("where", "this run", "other run")
        for each in self.differences[:rows]:
            table.add_row(each.where, *(_format(value) for value in (each.was, each.now)))
        if len(self.differences) > rows:
            table.caption = f"and {len(self.differences) - rows} more; --output FILE writes all"
        return [table] if self.differences else []


def compare_runs(run: Path, other: Path) -> RunComparison:
    """Compare all files of metrics and trajectories of two run folders. Raises ConfigError if a folder has no metrics
    or a line is not JSON, OSError if a file cannot be read."""
    report = RunComparison()
    for folder in (run, other):
        if not (folder / METRICS).is_file() or not (folder / METRICS).stat().st_size:
            raise ConfigError(f"{folder} has no {METRICS}, or it is empty; give the folders of two training runs")
    names = {path.relative_to(folder) for folder in (run, other) for path in folder.glob("trajectories/*.jsonl")}
    for name in (Path(METRICS), *sorted(names)):
        pairs = zip_longest(_read_lines(run / name), _read_lines(other / name))
        for number, (was, now) in enumerate(pairs, start=1):
            report.line_counts[name.name] = number
            difference = next(_find_differences(f"{name.name}:{number}", was, now), None)
            if difference is not None:
                report.differences.append(difference)
    return report


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                raise ConfigError(f"{path}:{number} is not JSON: {line[:MAX_DISPLAY_CHARACTERS]!r}") from None


def _find_differences(where: str, was: object, now: object) -> Iterator[RunDifference]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in sorted(was.keys() | now.keys()):
            if name not in VOLATILE_FIELDS and not _TIMING_METRICS.search(name):
                separator = " " if where.rpartition(":")[2].isdigit() else "."
                yield from _find_differences(f"{where}{separator}{name}", was.get(name), now.get(name))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, pair in enumerate(zip(was, now, strict=True)):
            yield from _find_differences(f"{where}[{index}]", *pair)
    elif was != now and not (was != was and now != now):  # NaN equals NaN here
        yield RunDifference(where, _shorten(was), _shorten(now))


def _shorten(value: object) -> object:
    """Return a scalar unchanged, and the beginning of the JSON of anything else."""
    return _format(value) if isinstance(value, dict | list) else value


def _format(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    text = text if len(text) <= MAX_DISPLAY_CHARACTERS else f"{text[: MAX_DISPLAY_CHARACTERS - 1]}…"
    # Unprintable characters may control a terminal, and a lone surrogate cannot be encoded.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
