"""The processes that this one has started, as the kernel knows them; of a local Ray cluster, above all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import NamedTuple

HEAD = "gcs_server"
"""Name of the process without which no call of Ray's comes back; after a minute Ray ends this process."""
_END_SECONDS = 5.0
_POLL_SECONDS = 0.05


class _Process(NamedTuple):
    pid: int
    started: str
    """In the kernel's ticks: a pid may be another's later."""


class ChildProcesses:
    """What this process, and what it started, have started since the last `refresh`, the dead among them."""

    def __init__(self) -> None:
        self._known: dict[_Process, str] = {}

    def refresh(self) -> None:
        """Learn of all that there are now. Those whose parent ended were seen before, or are not found."""
        parents, names, known = {}, {}, {process.pid for process in self._known}
        for process, parent, name in _all_processes():
            parents[process], names[process] = parent, name
        children: dict[int, list[_Process]] = {}
        for process, parent in parents.items():
            children.setdefault(parent, []).append(process)
        waiting = [os.getpid(), *known]
        while waiting:
            for child in children.pop(waiting.pop(), ()):
                self._known[child] = names[child]
                waiting.append(child.pid)
        self._known = {process: name for process, name in self._known.items() if process in parents or name == HEAD}

    def has_lost_head(self) -> bool:
        """Whether there was a head, and it is gone."""
        heads = [process for process, name in self._known.items() if name == HEAD]
        return bool(heads) and not any(map(_is_alive, heads))

    def terminate(self, *, at_once: bool) -> None:
        """Kill those that live; unless `at_once`, when they have had some seconds to end by themselves."""
        deadline = time.monotonic() + _END_SECONDS
        while not at_once and time.monotonic() < deadline and any(map(_is_alive, self._known)):
            time.sleep(_POLL_SECONDS)
        for process in self._known:
            if _is_alive(process):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)


def _all_processes() -> list[tuple[_Process, int, str]]:
    """Each with its parent and its name."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) is not None:
            words, title = fields
            found.append((_Process(int(name), words[19]), int(words[1]), title))
    return found


def _is_alive(process: _Process) -> bool:
    fields = _stat(process.pid)
    return fields is not None and fields[0][19] == process.started and fields[0][0] not in "ZX"


def _stat(pid: int) -> tuple[list[str], str] | None:
    """The fields of proc(5)'s ``stat`` from the state on, and the name; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, rest = file.read().rpartition(")")
    except OSError:
        return None
    return rest.split(), head.partition("(")[2]
