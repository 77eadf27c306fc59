"""A ceiling on the memory of a pool with all its runs, where the host lets us set one.

The limits of a single run do not need it; it keeps many runs together from taking the machine's memory.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass

_V1_MEMORY = "/sys/fs/cgroup/memory"
_V2 = "/sys/fs/cgroup"
_PREFIX = "verl-tool-"
_REMOVE_SECONDS = 5.0


@dataclass(frozen=True)
class ControlGroup:
    """A control group of our own (cgroups(7)), in version 1 or 2."""

    path: str

    @classmethod
    def create(cls, memory_bytes: int) -> ControlGroup | None:
        """Make a group with this ceiling; None if this process may not."""
        for parent, file in ((_V1_MEMORY, "memory.limit_in_bytes"), (_V2, "memory.max")):
            if not os.path.exists(os.path.join(parent, "cgroup.procs")):
                continue
            group = cls(os.path.join(parent, f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"))
            try:
                _remove_orphans(parent)
                os.mkdir(group.path)
                with open(os.path.join(group.path, file), "w", encoding="ascii") as ceiling:
                    ceiling.write(str(memory_bytes))
                return group
            except OSError:
                with contextlib.suppress(OSError):
                    os.rmdir(group.path)
        return None

    def joining(self, command: list[str]) -> list[str]:
        """`command`, started within the group."""
        return ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', self.path, *command]

    def remove(self) -> None:
        """Remove the group once its last process is gone."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        while os.path.isdir(self.path) and time.monotonic() < deadline:
            try:
                os.rmdir(self.path)
            except OSError:  # busy until the kernel has buried the last process
                time.sleep(0.01)


def _remove_orphans(parent: str) -> None:
    """Remove the groups of servers that were killed before they could."""
    for name in os.listdir(parent):
        owner = name.removeprefix(_PREFIX).split("-")[0]
        if name.startswith(_PREFIX) and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            with contextlib.suppress(OSError):  # not empty yet, or another server was faster
                os.rmdir(os.path.join(parent, name))
