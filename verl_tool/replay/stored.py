"""The trajectories that a training or an evaluation stored, each with the row that it answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from omegaconf import DictConfig, ListConfig
from pydantic import ValidationError

from eval_service.evaluation.dataset import Problem, read_problems
from eval_service.evaluation.record import read_records
from eval_service.model.run_config import run_config
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.errors import ConfigError
from verl_tool.replay.rows import Rows

RECORDS = "records.jsonl"
"""What an evaluation leaves in its folder."""
BRANCHES = "branches"
"""Folder, in that of a run, of the trajectories that went on from a turn of a stored one."""
_TRAINED = re.compile(r"(step|baseline|validation)_(\d+)\.jsonl")


@dataclass(frozen=True)
class Grading:
    score: float | None = None
    """None: no score."""
    details: dict[str, float | None] | None = None
    """Its numbers besides; None as NaN."""
    fault: str = ""
    """Why there is no score."""


@dataclass(frozen=True)
class Stored:
    where: str
    """File and line: ``step_3.jsonl:17``."""
    row: Problem | None
    """None: there is no row that has this prompt."""
    grading: Grading
    trajectory: Trajectory | None = None
    """None: the record of an answer by an endpoint that gives none."""
    content: str = ""
    """The text of such an answer."""

    @property
    def of_validation(self) -> bool:
        """Whether it ran with the limits of a validation, and answers a row of one."""
        return _of_validation(self.where)


class StoredRun:
    """The files of one run, read one trajectory at a time."""

    def __init__(self, folder: Path, data: Sequence[Path] = (), names: str = "*") -> None:
        """`data`: the rows, in place of those that the run's config names. `names`: a pattern of file names. Raises
        ConfigError if nothing is stored there."""
        self.folder, self._data = folder, tuple(data)
        self.config = None if (folder / RECORDS).is_file() else run_config(folder)
        where = folder if self.config is None else Path(str(self.config.get("trajectories_dir") or folder))
        found = [p for p in where.glob("*.jsonl") if p.name == RECORDS or _TRAINED.fullmatch(p.name)]
        self.files = sorted((p for p in found if fnmatchcase(p.name, names) or fnmatchcase(p.stem, names)), key=_order)
        if not self.files:
            raise ConfigError(f"no trajectories in {where} (looked for step_N.jsonl, {RECORDS}; names {names!r})")
        self._rows: dict[str, Rows] = {}

    def __iter__(self) -> Iterator[Stored]:
        for path in self.files:
            yield from self._in(path)

    def at(self, name: str, line: int) -> Stored:
        """The trajectory at a line, from 1, of a file of the run, or of its branches (``branches/NAME``). Raises
        ConfigError if there is none."""
        branches = sorted((self.folder / BRANCHES).glob("*.jsonl"))
        name = name if name.endswith(".jsonl") else f"{name}.jsonl"
        known = {path.name: path for path in self.files} | {f"{BRANCHES}/{path.name}": path for path in branches}
        if name not in known:
            raise ConfigError(f"{self.folder} has no file {name!r}; it has {', '.join(list(known)[:20])}")
        where = f"{known[name].name}:{line}"
        found = next((stored for stored in self._in(known[name]) if stored.where == where), None)
        if found is None:
            raise ConfigError(f"{known[name]} has no trajectory at line {line}; lines count from 1")
        return found

    def _in(self, path: Path) -> Iterator[Stored]:
        return self._answers(path) if path.name == RECORDS else self._trajectories(path)

    def _trajectories(self, path: Path) -> Iterator[Stored]:
        rows = self._rows_of("val" if _of_validation(path.name) else "train")
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    trajectory = Trajectory.from_json(line)
                except ValidationError as error:
                    raise ConfigError(f"{path}:{number} is no trajectory: {error.errors()[0]['msg']}") from None
                info = trajectory.extra.get("reward_extra_info") or {}
                details = {str(name): value for name, value in info.items() if not isinstance(value, str)}
                grading = Grading(trajectory.reward, details, str(trajectory.extra.get("reward_fault") or ""))
                row = rows.of(trajectory)
                yield Stored(f"{path.name}:{number}", row, grading, trajectory)

    def _answers(self, path: Path) -> Iterator[Stored]:
        rows = self._rows_of("val")
        for number, record in enumerate(read_records(path), start=1):
            if record.error is None:
                grading = Grading(record.score, dict(record.details), record.reward_fault or "")
                row = rows.at(record.index, record.trajectory)
                yield Stored(f"{path.name}:{number}", row, grading, record.trajectory, record.content)

    def _rows_of(self, split: str) -> Rows:
        if split not in self._rows:
            self._rows[split] = Rows([row for path in self._data or self._files(split) for row in read_problems(path)])
        return self._rows[split]

    def _files(self, split: str) -> list[Path]:
        if self.config is None:
            raise ConfigError(f"{self.folder} does not tell whose answers it holds; give their file: --data FILE")
        return data_files(self.config, split)


def data_files(config: DictConfig, split: str) -> list[Path]:
    """The files of a run's rows; `split`: ``train`` or ``val``."""
    named = config.data[f"{split}_files"]
    return [Path(str(name)) for name in (named if isinstance(named, ListConfig) else [named])]


def _of_validation(name: str) -> bool:
    return name.startswith(("validation", "records"))


def _order(path: Path) -> tuple[int, str]:
    found = _TRAINED.fullmatch(path.name)
    return (int(found.group(2)) if found else 0, path.name)
