"""Ends runs that exceed their limits by what their control groups count, while they run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.isolation.cgroup import RunGroup
from verl_tool.sandbox.limits import Limits

_FIRST_LOOK = 0.05
"""Seconds that a run lives before its use is looked at; most never get that old."""
_LOOK_EVERY = 0.1


class EnforcedRun:
    """A run that goes on, and its limits."""

    def __init__(self, group: RunGroup, limits: Limits, kill: Callable[[int], None]) -> None:
        """`kill`: ends the run for one of the limits that `wire` numbers."""
        self._group = group
        self._limits = limits
        self._kill = kill
        self._begun = time.monotonic()

    def look(self, now: float) -> None:
        """End the run if it is over a limit."""
        if now - self._begun < _FIRST_LOOK:
            return
        group = self._group
        group.look()
        used = group.cpu_seconds()
        if self._limits.cpu_seconds is not None and used >= self._limits.cpu_seconds:
            self._kill(wire.CPU)
        elif group.lost_process():  # version 1 kills one process of many: none is to go on without it
            self._kill(wire.MEMORY if group.exceeded_memory() else wire.LOST)


class LimitEnforcer:
    """Looks at all running runs of a pool that have control groups."""

    def __init__(self) -> None:
        self._held: set[EnforcedRun] = set()
        self._some = asyncio.Event()

    @contextlib.contextmanager
    def enforced(self, group: RunGroup, limits: Limits, kill: Callable[[int], None]) -> Iterator[None]:
        """Look after a run meanwhile; see `EnforcedRun`."""
        run = EnforcedRun(group, limits, kill)
        self._held.add(run)
        self._some.set()
        try:
            yield
        finally:
            self._held.discard(run)
            if not self._held:
                self._some.clear()

    async def watch(self) -> None:
        """Look after all runs, for ever."""
        while True:
            await self._some.wait()
            await asyncio.sleep(_LOOK_EVERY)
            now = time.monotonic()
            for run in tuple(self._held):
                with contextlib.suppress(OSError):  # a group that can be read no more counts nothing
                    run.look(now)
