"""Read the trajectories that a training or an evaluation stored, each with the row that it answers."""

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
"""File of an evaluation's answers in its folder."""
BRANCHES = "branches"
"""Folder, in a run's folder, of trajectories that continue a stored one."""
_TRAINED = re.compile(r"(step|baseline|validation)_(\d+)\.jsonl")


@dataclass(frozen=True)
class Grading:
    score: float | None = None
    details: dict[str, float | None] | None = None
    """Other values of the reward manager; None stands for NaN."""
    fault: str = ""
    """Why there is no score."""


@dataclass(frozen=True)
class StoredAnswer:
    where: str
    """File and line: ``step_3.jsonl:17``."""
    row: Problem | None
    """None if no row matches."""
    grading: Grading
    trajectory: Trajectory | None = None
    """None if an endpoint answered that returns no trajectory."""
    content: str = ""
    """The text of an answer without a trajectory."""

    @property
    def is_validation(self) -> bool:
        """Whether it ran with the limits of a validation and answers a row of the validation set."""
        return _is_validation(self.where)


class StoredRun:
    """The stored trajectories of one run, read one at a time."""

    def __init__(self, folder: Path, data: Sequence[Path] = (), names: str = "*") -> None:
        """Find the files. `data` replaces the rows that the run's config names; `names` is a pattern of file names.
        Raises ConfigError if no file matches."""
        self.folder, self._data = folder, tuple(data)
        self.config = None if (folder / RECORDS).is_file() else run_config(folder)
        where = folder if self.config is None else Path(str(self.config.get("trajectories_dir") or folder))
        found = [p for p in where.glob("*.jsonl") if p.name == RECORDS or _TRAINED.fullmatch(p.name)]
        self.files = sorted((p for p in found if fnmatchcase(p.name, names) or fnmatchcase(p.stem, names)), key=_number)
        if not self.files:
            raise ConfigError(f"no trajectories in {where} (looked for step_N.jsonl, {RECORDS}; names {names!r})")
        self._rows: dict[str, Rows] = {}

    def __iter__(self) -> Iterator[StoredAnswer]:
        for path in self.files:
            yield from self._read(path)

    def find(self, name: str, line: int) -> StoredAnswer:
        """Return the trajectory at a line, from 1, of a file of the run or of its branches (``branches/NAME``). Raises
        ConfigError if it does not exist."""
        branches = sorted((self.folder / BRANCHES).glob("*.jsonl"))
        name = name if name.endswith(".jsonl") else f"{name}.jsonl"
        known = {path.name: path for path in self.files} | {f"{BRANCHES}/{path.name}": path for path in branches}
        if name not in known:
            raise ConfigError(f"{self.folder} has no file {name!r}; it has {', '.join(list(known)[:20])}")
        where = f"{known[name].name}:{line}"
        found = next((stored for stored in self._read(known[name]) if stored.where == where), None)
        if found is None:
            raise ConfigError(f"{known[name]} has no trajectory at line {line}; lines count from 1")
        return found

    def _read(self, path: Path) -> Iterator[StoredAnswer]:
        return self._read_records(path) if path.name == RECORDS else self._read_trajectories(path)

    def _read_trajectories(self, path: Path) -> Iterator[StoredAnswer]:
        rows = self._load_rows("val" if _is_validation(path.name) else "train")
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    trajectory = Trajectory.from_json(line)
                except ValidationError as error:
                    raise ConfigError(f"{path}:{number} is not a trajectory: {error.errors()[0]['msg']}") from None
                info = trajectory.extra.get("reward_extra_info") or {}
                details = {str(name): value for name, value in info.items() if not isinstance(value, str)}
                grading = Grading(trajectory.reward, details, str(trajectory.extra.get("reward_fault") or ""))
                yield StoredAnswer(f"{path.name}:{number}", rows.match(trajectory), grading, trajectory)

    def _read_records(self, path: Path) -> Iterator[StoredAnswer]:
        rows = self._load_rows("val")
        for number, record in enumerate(read_records(path), start=1):
            if record.error is None:
                grading = Grading(record.score, dict(record.details), record.reward_fault or "")
                row = rows.get(record.index, record.trajectory)
                yield StoredAnswer(f"{path.name}:{number}", row, grading, record.trajectory, record.content)

    def _load_rows(self, split: str) -> Rows:
        if split not in self._rows:
            paths = self._data or self._find_data(split)
            self._rows[split] = Rows([row for path in paths for row in read_problems(path)])
        return self._rows[split]

    def _find_data(self, split: str) -> list[Path]:
        if self.config is None:
            raise ConfigError(f"{self.folder} does not name the rows that it answers; give their file: --data FILE")
        return data_files(self.config, split)


def data_files(config: DictConfig, split: str) -> list[Path]:
    """Return the files of a run's rows. `split` is ``train`` or ``val``."""
    named = config.data[f"{split}_files"]
    return [Path(str(name)) for name in (named if isinstance(named, ListConfig) else [named])]


def _is_validation(name: str) -> bool:
    return name.startswith(("validation", "records"))


def _number(path: Path) -> tuple[int, str]:
    found = _TRAINED.fullmatch(path.name)
    return (int(found.group(2)) if found else 0, path.name)
