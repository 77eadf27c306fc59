"""Where branches are stored: ``branches/step_3.17.jsonl`` in the run's folder has those of ``step_3.jsonl:17``.

Its lines are records of trajectories as any other file's, with `extra.branch` besides. ``step_3.17.values.json`` has
the values of its turns. Branches of a branch, ``branches/step_3.17.jsonl:2``, are in ``branches/step_3.17.2.jsonl``.
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
from verl_tool.replay.branch.branch_point import BranchPlace
from verl_tool.replay.branch.branch_values import TurnValue
from verl_tool.replay.stored import BRANCHES
from verl_tool.util.atomic_files import atomic_write

LOCK_SECONDS = 30.0
"""The longest wait for another command that writes into the same folder."""


def branches_path(run: Path, place: BranchPlace) -> Path:
    """The file of the branches of a trajectory."""
    name = place.file.removeprefix(f"{BRANCHES}/").removesuffix(".jsonl")
    return run / BRANCHES / f"{name}.{place.line}.jsonl"


def values_path(run: Path, place: BranchPlace) -> Path:
    """The file of the values of a trajectory's turns."""
    return branches_path(run, place).with_suffix(".values.json")


def add_branches(run: Path, place: BranchPlace, records: Sequence[Trajectory]) -> range:
    """Put `records` behind the branches that are there, all or none. The numbers of their lines, from 1. Raises
    ConfigError if another command holds the folder for `LOCK_SECONDS`."""
    path = branches_path(run, place)
    with _held(path.parent):
        before = path.read_bytes() if path.is_file() else b""
        _replace(path, before + "".join(f"{record.to_json()}\n" for record in records).encode())
    first = before.count(b"\n") + 1
    return range(first, first + len(records))


def write_values(run: Path, place: BranchPlace, values: Sequence[TurnValue], model: str) -> Path:
    """Store the values of a trajectory's turns in place of those that are there. The file."""
    content = {
        "file": place.file,
        "line": place.line,
        "model": model,
        "turns": [value.to_json() for value in values],
    }
    path = values_path(run, place)
    with _held(path.parent):
        _replace(path, json.dumps(content, indent=1).encode() + b"\n")
    return path


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """No other command writes into `folder` while the block runs."""
    folder.mkdir(exist_ok=True)
    handle, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    words = f"another command has been writing into {folder} for {LOCK_SECONDS:g} s; wait for its end"
                    raise ConfigError(words) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, content: bytes) -> None:
    with atomic_write(path) as draft, draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
