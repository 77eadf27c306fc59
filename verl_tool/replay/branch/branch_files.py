"""Store branches in the run's folder: those of ``step_3.jsonl:17`` in ``branches/step_3.17.jsonl``.

A line is a record of a trajectory, with its origin in `extra.branch`. ``step_3.17.values.json`` has the values of the
turns. Branches of a branch, ``branches/step_3.17.jsonl:2``, are in ``branches/step_3.17.2.jsonl``.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.errors import ConfigError
from verl_tool.replay.branch.branch_point import RecordLocation
from verl_tool.replay.branch.branch_values import TurnValue
from verl_tool.replay.stored import BRANCHES
from verl_tool.util.atomic_files import atomic_write

LOCK_SECONDS = 30.0
"""How long to wait for another command that writes to the same folder."""


def branches_path(run: Path, location: RecordLocation) -> Path:
    """Return the file of a trajectory's branches."""
    name = location.file.removeprefix(f"{BRANCHES}/").removesuffix(".jsonl")
    return run / BRANCHES / f"{name}.{location.line}.jsonl"


def values_path(run: Path, location: RecordLocation) -> Path:
    """Return the file of the values of a trajectory's turns."""
    return branches_path(run, location).with_suffix(".values.json")


def add_branches(run: Path, location: RecordLocation, records: Sequence[Trajectory]) -> range:
    """Append all of `records` or none to the stored branches, and return their line numbers, from 1. Raises ConfigError
    if another command locks the folder for `LOCK_SECONDS`."""
    path = branches_path(run, location)
    with _lock(path.parent):
        stored = path.read_bytes() if path.is_file() else b""
        _write(path, stored + "".join(f"{record.to_json()}\n" for record in records).encode())
    first = stored.count(b"\n") + 1
    return range(first, first + len(records))


def write_values(run: Path, location: RecordLocation, values: Sequence[TurnValue], model: str) -> Path:
    """Store the values of a trajectory's turns, replacing earlier ones, and return the file."""
    content = {
        "file": location.file,
        "line": location.line,
        "model": model,
        "turns": [value.to_json() for value in values],
    }
    path = values_path(run, location)
    with _lock(path.parent):
        _write(path, json.dumps(content, indent=1).encode() + b"\n")
    return path


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other commands from writing to `folder` while the block runs."""
    folder.mkdir(exist_ok=True)
    handle, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"{folder} has been locked by another command for {LOCK_SECONDS:g} s") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _write(path: Path, content: bytes) -> None:
    with atomic_write(path) as draft, draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
