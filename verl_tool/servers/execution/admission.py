"""How much one replica takes on at a time, counted in entries of requests rather than in requests."""

from __future__ import annotations

import asyncio
from collections import Counter

from verl_tool.errors import ConfigError


class Admission:
    """A bounded number of places to run, and a bounded queue before them.

    An entry is admitted at the door (`admit`, at once or not at all) and waits for a place (`place`) where it is about
    to run. Entries that a peer runs take part of the queue only.
    """

    def __init__(self, max_running: int, max_queued: int) -> None:
        if max_running < 1 or max_queued < 0:
            raise ConfigError(
                f"max_concurrent_requests is {max_running} and max_queued is {max_queued}; "
                "the first must be at least 1, the second at least 0"
            )
        self.limit = max_running + max_queued
        """The most entries inside at a time."""
        self.inside = 0
        """Entries admitted and not answered yet."""
        self.running = 0
        """Entries that hold a place."""
        self._places = asyncio.Semaphore(max_running)
        self._waiting: Counter[str] = Counter()

    @property
    def queued(self) -> int:
        """Entries admitted that hold no place."""
        return self.inside - self.running

    def waiting(self, tool: str) -> int:
        """Entries that wait for a place to run `tool`."""
        return self._waiting[tool]

    def admit(self, entries: int) -> bool:
        """Let `entries` in if there is room for all of them; `release` them afterwards."""
        if self.inside + entries > self.limit:
            return False
        self.inside += entries
        return True

    def release(self, entries: int) -> None:
        """They have been answered."""
        self.inside -= entries

    def place(self, tool: str) -> Place:
        """``async with`` it to hold a place while running `tool`, in the order of arrival."""
        return Place(self, tool)

    async def _take(self, tool: str) -> None:
        self._waiting[tool] += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting[tool] -= 1
        self.running += 1

    def _give_back(self) -> None:
        self.running -= 1
        self._places.release()


class Place:
    """A place to run, held in an ``async with`` block."""

    __slots__ = ("_admission", "_tool")

    def __init__(self, admission: Admission, tool: str) -> None:
        self._admission = admission
        self._tool = tool

    async def __aenter__(self) -> None:
        await self._admission._take(self._tool)

    async def __aexit__(self, *_: object) -> None:
        self._admission._give_back()
