"""Which runs there are below some folders, and which files each has left."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from verl_tool.errors import ConfigError

BRANCHES = "branches"
"""Folder of what went on from stored trajectories: ``branches/step_3.17.jsonl`` from line 17 of step 3."""
_PASSED_OVER = {
    BRANCHES,
    "checkpoints",
    "config",
    "data",
    "images",
    "model",
    "tensorboard",
    "trajectories",
    "wandb",
    "world",
}
_DEPTH = 8
"""Of folders below a root."""
_NUMBERED = re.compile(r"(step|validation|baseline)_(\d+)\.jsonl")


@dataclass(frozen=True)
class RecordFile:
    """A file with a trajectory a line."""

    path: Path
    kind: str
    """step, validation, baseline, evaluation, branch, or records if it is none of them."""
    step: int | None

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class Run:
    """What a training or an evaluation has left, or a file of trajectories."""

    name: str
    """Path below the folder in which it was found."""
    folder: Path
    file: Path | None = None
    """Of a run that is this file only."""

    @property
    def records_folder(self) -> Path:
        """Where the records lie, and the folder ``images`` with them."""
        trajectories = self.folder / "trajectories"
        return trajectories if self.file is None and trajectories.is_dir() else self.folder

    def record_files(self) -> list[RecordFile]:
        """By step, validations first; branches last."""
        if self.file is not None:
            return [record_file(self.file)]
        with os.scandir(self.records_folder) as entries:
            found = [record_file(Path(e.path)) for e in entries if _NUMBERED.fullmatch(e.name)]
        if (self.folder / "records.jsonl").is_file():
            found.append(record_file(self.folder / "records.jsonl"))
        found.sort(key=lambda file: (-1 if file.step is None else file.step, file.kind == "step", file.name))
        branches = (self.folder / BRANCHES).glob("*.jsonl")
        return [*found, *(RecordFile(path, "branch", None) for path in sorted(branches))]

    def config(self) -> dict[str, str]:
        """Every option by its whole name; empty if the run has left no config.

        Raises ConfigError if it cannot be read.
        """
        path = self.folder / "config.yaml"
        return _flat_config(path, path.stat().st_mtime_ns) if path.is_file() else {}


def record_file(path: Path) -> RecordFile:
    """The file at `path`, by its name."""
    numbered = _NUMBERED.fullmatch(path.name)
    if numbered:
        return RecordFile(path, numbered[1], int(numbered[2]))
    return RecordFile(path, "evaluation" if path.name == "records.jsonl" else "records", None)


def find_runs(roots: Iterable[Path]) -> dict[str, Run]:
    """Runs by their names, in order. A root is a folder with runs somewhere below it, a run, or a file of records."""
    runs: dict[str, Run] = {}
    for root in roots:
        for run in _runs_below(root.resolve()):
            name, number = run.name, 2
            while name in runs and runs[name].folder != run.folder:
                name, number = f"{run.name} ({number})", number + 1
            runs[name] = Run(name, run.folder, run.file)
    return dict(sorted(runs.items()))


def _runs_below(root: Path) -> Iterator[Run]:
    if root.is_file():
        yield Run(root.stem, root.parent, root)
        return
    if root.name == "trajectories":
        root = root.parent
    depth = len(root.parts)
    for folder, folders, files in os.walk(root):
        path = Path(folder)
        if _is_run(path, folders, files):
            name = str(path.relative_to(root))
            yield Run(path.name if name == "." else name, path)
        inside = len(path.parts) - depth < _DEPTH
        folders[:] = sorted(f for f in folders if inside and f not in _PASSED_OVER and f[0] != ".")


def _is_run(path: Path, folders: list[str], files: list[str]) -> bool:
    if "metrics.jsonl" in files or "records.jsonl" in files or any(_NUMBERED.fullmatch(name) for name in files):
        return True
    return "trajectories" in folders and any(_NUMBERED.fullmatch(name) for name in os.listdir(path / "trajectories"))


@lru_cache(maxsize=64)
def _flat_config(path: Path, _changed: int) -> dict[str, str]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return dict(_flat("", yaml.load(path.read_bytes(), loader)))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), part)
    else:
        yield name, str(value)
