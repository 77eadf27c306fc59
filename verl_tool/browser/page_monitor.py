"""Ends pages that take too much: chromium's processes, watched from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass

INTERVAL_SECONDS = 0.25
_RENDERER = b"--type=renderer"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class PageLimits:
    """What chromium's processes may take."""

    page_bytes: int
    """Memory of one page's process (a renderer)."""
    total_bytes: int
    """Memory of all processes."""
    page_cpu_seconds: float
    """CPU time of one page's process."""


@dataclass(frozen=True)
class ProcessUse:
    """What one process of chromium takes."""

    pid: int
    is_renderer: bool
    bytes: int
    """Anonymous and shared memory, without files."""
    cpu_seconds: float


class PageMonitor:
    """Kills each renderer above its limits, and the largest one while all processes together are above theirs."""

    def __init__(self, root_pid: int, limits: PageLimits) -> None:
        self._root, self._limits = root_pid, limits
        self.kills = 0
        """Renderers that were ended."""

    async def watch(self) -> None:
        """Check periodically, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            await asyncio.to_thread(self.check)

    def check(self) -> None:
        """Check once."""
        processes, limits = self.processes(), self._limits
        renderers = sorted((each for each in processes if each.is_renderer), key=lambda each: each.bytes)
        total = sum(each.bytes for each in processes)
        for each in reversed(renderers):
            above = each.bytes > limits.page_bytes or each.cpu_seconds > limits.page_cpu_seconds
            if above or total > limits.total_bytes:
                total -= each.bytes
                self._kill(each.pid)

    def processes(self) -> list[ProcessUse]:
        """Return chromium's processes as they are now."""
        found, waiting = [], [self._root]
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError, ValueError):
                use = _read_use(pid)
                found.append(use)
                # Renderers are most of them, and start nothing.
                waiting += [] if use.is_renderer else _children(pid)
        return found

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            self.kills += 1


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
            children += map(int, file.read().split())
    return children


def _read_use(pid: int) -> ProcessUse:
    """Raises OSError if the process has ended."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        is_renderer = _RENDERER in file.read(4096)
    kilobytes = 0
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(("RssAnon:", "RssShmem:")):
                kilobytes += int(line.split()[1])
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return ProcessUse(pid, is_renderer, kilobytes << 10, (int(fields[11]) + int(fields[12])) / _TICKS)
