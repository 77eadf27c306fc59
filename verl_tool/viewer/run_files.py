"""Which runs there are below some folders, and which files each has left."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from verl_tool.errors import ConfigError
from verl_tool.util.confined_files import UnsafeFileError, open_confined, read_confined

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
_NUMBERED = re.compile(r"(step|validation|baseline)_(\d+)\.jsonl", re.ASCII)
MAX_STEP = (1 << 31) - 1
_MAX_CONFIG_BYTES = 4 << 20
_MAX_CONFIG_EVENTS = 200_000
_MAX_CONFIG_DEPTH = 64
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class RecordFile:
    path: Path
    kind: str
    """step, validation, baseline, evaluation, branch, or records if it is none of them."""
    step: int | None
    folder: Path
    """Of the run; links out of it are not followed."""
    number: int = 1
    """Among the run's files of one name: ``branches/step_1.jsonl`` may stand beside ``step_1.jsonl``."""

    @property
    def name(self) -> str:
        """No other file of the run has it."""
        return printable(self.path.stem) + (f" ({self.number})" if self.number > 1 else "")

    def open(self) -> BinaryIO:
        """Open it for reading. Raises OSError, and UnsafeFileError if it is no regular file of the run's folder."""
        if self.step is not None and self.step > MAX_STEP:
            raise UnsafeFileError(f"{self.path} is named for step {self.step}, and steps end at {MAX_STEP}; rename it")
        return open_confined(self.path, self.folder)


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
            return [_record_file(self.file, self.folder)]
        with os.scandir(self.records_folder) as entries:
            found = [_record_file(Path(e.path), self.folder) for e in entries if _NUMBERED.fullmatch(e.name)]
        if (self.folder / "records.jsonl").exists():
            found.append(_record_file(self.folder / "records.jsonl", self.folder))
        found.sort(key=lambda file: (-1 if file.step is None else file.step, file.kind == "step", file.name))
        branches = (self.folder / BRANCHES).glob("*.jsonl")
        return _with_own_names([*found, *(RecordFile(path, "branch", None, self.folder) for path in sorted(branches))])

    def config(self) -> dict[str, str]:
        """Every option by its whole name; empty if the run has no config. Raises ConfigError if it cannot be read."""
        path = self.folder / "config.yaml"
        return _flat_config(path, self.folder, path.stat().st_mtime_ns) if path.exists() else {}


def _with_own_names(files: Iterable[RecordFile]) -> list[RecordFile]:
    named: dict[str, RecordFile] = {}
    for file in files:
        while file.name in named:
            file = replace(file, number=file.number + 1)
        named[file.name] = file
    return list(named.values())


def printable(name: str) -> str:
    """`name` with a mark in place of bytes that are no UTF-8, which no answer could hold."""
    return os.fsencode(name).decode("utf-8", "replace")


def _record_file(path: Path, folder: Path) -> RecordFile:
    numbered = _NUMBERED.fullmatch(path.name)
    if numbered:
        # Python converts no number of more than some thousand digits; `open` refuses far smaller ones.
        return RecordFile(path, numbered[1], int(numbered[2][:20]), folder)
    return RecordFile(path, "evaluation" if path.name == "records.jsonl" else "records", None, folder)


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
        yield Run(printable(root.stem), root.parent, root)
        return
    if root.name == "trajectories":
        root = root.parent
    depth = len(root.parts)
    for folder, folders, files in os.walk(root):
        path = Path(folder)
        if _is_run(path, folders, files):
            name = printable(str(path.relative_to(root)))
            yield Run(printable(path.name) if name == "." else name, path)
        inside = len(path.parts) - depth < _DEPTH
        folders[:] = sorted(f for f in folders if inside and f not in _PASSED_OVER and f[0] != ".")


def _is_run(path: Path, folders: list[str], files: list[str]) -> bool:
    if "metrics.jsonl" in files or "records.jsonl" in files or any(_NUMBERED.fullmatch(name) for name in files):
        return True
    if "trajectories" not in folders:
        return False
    with contextlib.suppress(OSError):
        return any(_NUMBERED.fullmatch(name) for name in os.listdir(path / "trajectories"))
    return False


@lru_cache(maxsize=64)
def _flat_config(path: Path, folder: Path, _changed: int) -> dict[str, str]:
    try:
        content = read_confined(path, folder, _MAX_CONFIG_BYTES)
        _check_yaml_size(content)
        return dict(_flat("", yaml.load(content, _LOADER)))
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None


def _check_yaml_size(content: bytes) -> None:
    """Raise ValueError for YAML that grows when it is loaded: some hundred bytes of aliases make gigabytes."""
    depth = 0
    for number, event in enumerate(yaml.parse(content, _LOADER)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it has an alias (*name), which no run writes")
        if number > _MAX_CONFIG_EVENTS or depth > _MAX_CONFIG_DEPTH:
            raise ValueError(f"it has more than {_MAX_CONFIG_EVENTS} parts, or is nested over {_MAX_CONFIG_DEPTH} deep")


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), part)
    else:
        yield name, str(value)
