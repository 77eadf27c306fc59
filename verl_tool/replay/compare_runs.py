"""Two runs next to each other: are their metrics and trajectories the same, but for times and ids?"""

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
_TIMES = re.compile(r"(^|/)(timing_s|timing_per_token_ms|perf|seconds)/|/seconds_")
"""In the names of metrics that tell how long something took, or how much of the machine."""
OTHER_EACH_TIME = frozenset({"trajectory_id", "timings", "seconds"})
"""Fields of a trajectory, and of its calls, of the same kind."""
MAX_DISPLAY_CHARACTERS = 60


@dataclass(frozen=True)
class RunDifference:
    """A value that is another one in the other run."""

    where: str
    """File and line, and the way to the value: ``step_1.jsonl:3 segments[2].tokens[0]``."""
    was: object
    now: object

    def to_json(self) -> str:
        return json.dumps({"where": self.where, "was": self.was, "now": self.now}, ensure_ascii=False)


@dataclass
class SameRuns:
    lines_of: dict[str, int] = field(default_factory=dict)
    """Compared lines, by file."""
    differences: list[RunDifference] = field(default_factory=list)
    """The first of each line."""
    without_row: list[str] = field(default_factory=list)

    def words(self) -> str:
        metrics = self.lines_of.get(METRICS, 0)
        others = sum(self.lines_of.values()) - metrics
        words = f"{metrics} lines of metrics and {others} trajectories compared, "
        return words + (f"{len(self.differences)} are different" if self.differences else "all the same")

    def lines(self) -> list[str]:
        return [difference.to_json() for difference in self.differences]

    def unexpected_count(self, known: Collection[tuple[str, object]], *, asked: bool) -> int:
        """How many differences are not `known` (where, and the value of the other run)."""
        return sum((each.where, each.now) not in known for each in self.differences)

    def tables(self, rows: int = 20) -> list[Table]:
        table = Table("where", "here", "there")
        for each in self.differences[:rows]:
            table.add_row(each.where, *(_format(value) for value in (each.was, each.now)))
        if len(self.differences) > rows:
            table.caption = f"and {len(self.differences) - rows} more; --output FILE has all"
        return [table] if self.differences else []


def compare_runs(run: Path, other: Path) -> SameRuns:
    """All files of metrics and trajectories that either has. Raises ConfigError for a folder without metrics, and for
    a line that is no JSON; OSError for a file that cannot be read."""
    report = SameRuns()
    for folder in (run, other):
        if not (folder / METRICS).is_file() or not (folder / METRICS).stat().st_size:
            raise ConfigError(f"{folder} has no {METRICS}, or nothing in it; give the folders of two trainings")
    found = {path.relative_to(folder) for folder in (run, other) for path in folder.glob("trajectories/*.jsonl")}
    for name in (Path(METRICS), *sorted(found)):
        pairs = zip_longest(_lines(run / name), _lines(other / name))
        for number, (was, now) in enumerate(pairs, start=1):
            report.lines_of[name.name] = number
            difference = next(_differences(f"{name.name}:{number}", was, now), None)
            if difference is not None:
                report.differences.append(difference)
    return report


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                raise ConfigError(f"{path}:{number} is no JSON: {line[:MAX_DISPLAY_CHARACTERS]!r}") from None


def _differences(where: str, was: object, now: object) -> Iterator[RunDifference]:
    if isinstance(was, dict) and isinstance(now, dict):
        for name in sorted(was.keys() | now.keys()):
            if name not in OTHER_EACH_TIME and not _TIMES.search(name):
                gap = " " if where.rpartition(":")[2].isdigit() else "."
                yield from _differences(f"{where}{gap}{name}", was.get(name), now.get(name))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, pair in enumerate(zip(was, now, strict=True)):
            yield from _differences(f"{where}[{index}]", *pair)
    elif was != now and not (was != was and now != now):  # NaN is the same as NaN
        yield RunDifference(where, _describe(was), _describe(now))


def _describe(value: object) -> object:
    """The value if it is a plain one, else the beginning of its JSON."""
    return _format(value) if isinstance(value, dict | list) else value


def _format(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    text = text if len(text) <= MAX_DISPLAY_CHARACTERS else f"{text[: MAX_DISPLAY_CHARACTERS - 1]}…"
    # A terminal may obey what is not printable, and half a surrogate pair cannot be written.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
