"""End runs that exceed their limits, by the counts of their control groups."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.isolation.cgroup import RunGroup
from verl_tool.sandbox.limits import Limits

_FIRST_CHECK_SECONDS = 0.05
"""Age of a run at its first check. Most runs are shorter."""
_CHECK_INTERVAL_SECONDS = 0.1


class EnforcedRun:
    """A run in progress, and its limits."""

    def __init__(self, group: RunGroup, limits: Limits, kill: Callable[[int], None]) -> None:
        """`kill` ends the run. Its argument is the number of the limit in `wire`."""
        self._group = group
        self._limits = limits
        self._kill = kill
        self._started_at = time.monotonic()

    def check(self, now: float) -> None:
        """End the run if it exceeds a limit."""
        if now - self._started_at < _FIRST_CHECK_SECONDS:
            return
        group = self._group
        group.look()
        used = group.cpu_seconds()
        if self._limits.cpu_seconds is not None and used >= self._limits.cpu_seconds:
            self._kill(wire.CPU)
        elif group.lost_process():  # cgroup version 1 kills one of many processes: end the others too
            self._kill(wire.MEMORY if group.exceeded_memory() else wire.LOST)


class LimitEnforcer:
    """Checks all runs of a pool that have control groups."""

    def __init__(self) -> None:
        self._runs: set[EnforcedRun] = set()
        self._has_runs = asyncio.Event()

    @contextlib.contextmanager
    def enforced(self, group: RunGroup, limits: Limits, kill: Callable[[int], None]) -> Iterator[None]:
        """Enforce the limits of a run within the block. The arguments are those of `EnforcedRun`."""
        run = EnforcedRun(group, limits, kill)
        self._runs.add(run)
        self._has_runs.set()
        try:
            yield
        finally:
            self._runs.discard(run)
            if not self._runs:
                self._has_runs.clear()

    async def watch(self) -> None:
        """Check all runs periodically, until cancelled."""
        while True:
            await self._has_runs.wait()
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)
            now = time.monotonic()
            for run in tuple(self._runs):
                with contextlib.suppress(OSError):  # the group was removed
                    run.check(now)
