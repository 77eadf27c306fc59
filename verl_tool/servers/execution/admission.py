"""Limit the load of one replica, counted in entries of requests and not in requests."""

from __future__ import annotations

import asyncio
from collections import Counter

from verl_tool.errors import ConfigError


class Admission:
    """A bounded number of slots for running entries, and a bounded queue before them.

    `admit` accepts or rejects an entry immediately. Before it runs, the entry waits for a slot (`place`). Entries that
    a peer runs count for the queue only.
    """

    def __init__(self, max_running: int, max_queued: int) -> None:
        if max_running < 1 or max_queued < 0:
            raise ConfigError(
                f"max_concurrent_requests is {max_running} and max_queued is {max_queued}; "
                "the first must be at least 1, the second at least 0"
            )
        self.limit = max_running + max_queued
        """Maximum number of admitted entries."""
        self.inside = 0
        """Number of entries that are admitted and not answered yet."""
        self.running = 0
        """Number of entries that hold a slot."""
        self._places = asyncio.Semaphore(max_running)
        self._waiting: Counter[str] = Counter()

    @property
    def queued(self) -> int:
        """Number of admitted entries without a slot."""
        return self.inside - self.running

    def waiting(self, tool: str) -> int:
        """Return the number of entries that wait for a slot to run `tool`."""
        return self._waiting[tool]

    def admit(self, entries: int) -> bool:
        """Admit `entries` if all of them fit within the limit. `release` them afterwards."""
        if self.inside + entries > self.limit:
            return False
        self.inside += entries
        return True

    def release(self, entries: int) -> None:
        """Release entries that have been answered."""
        self.inside -= entries

    def place(self, tool: str) -> Place:
        """Return an async context manager that holds a slot to run `tool`. Slots are given in the order of arrival."""
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
    """A slot to run an entry, held within an ``async with`` block."""

    __slots__ = ("_admission", "_tool")

    def __init__(self, admission: Admission, tool: str) -> None:
        self._admission = admission
        self._tool = tool

    async def __aenter__(self) -> None:
        await self._admission._take(self._tool)

    async def __aexit__(self, *_: object) -> None:
        self._admission._give_back()
