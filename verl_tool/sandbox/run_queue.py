"""Queue and slots for the runs of a pool."""

from __future__ import annotations

import asyncio
from collections import deque

from verl_tool.errors import SandboxError

SHORT_SECONDS = 1.0
"""A run that takes longer gives its slot for short runs to the next one, so that a few hanging runs do not block all
others. It still counts towards the maximum number of runs."""


class RunSlot:
    """The slot of one run."""

    def __init__(self) -> None:
        self.is_short = True
        self.timer: asyncio.TimerHandle | None = None


class RunSlots:
    """Slots for short runs and for all runs, given in the order of arrival."""

    def __init__(self, short: int, maximum: int, max_queued: int) -> None:
        """At most `maximum` runs at the same time, of which at most `short` are younger than `SHORT_SECONDS`."""
        self.maximum = maximum
        self.live = 0
        self._short_slots, self._max_queued = short, max_queued
        self._short = 0
        self._queue: deque[asyncio.Future[RunSlot]] = deque()

    @property
    def queued(self) -> int:
        return len(self._queue)

    async def enter(self) -> RunSlot:
        """Wait for a slot and take it. Pass it to `leave` afterwards. Raises SandboxError if the queue is full."""
        if not self._queue and self._has_capacity():
            return self._take()
        if len(self._queue) >= self._max_queued:
            raise SandboxError(f"the sandbox's queue is full ({self._max_queued} runs wait); try again later")
        ticket: asyncio.Future[RunSlot] = asyncio.get_running_loop().create_future()
        self._queue.append(ticket)
        try:
            return await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self.leave(ticket.result())  # the slot was assigned already
            raise

    def leave(self, slot: RunSlot) -> None:
        if slot.timer is not None:
            slot.timer.cancel()
        self.live -= 1
        self._short -= slot.is_short
        self._admit()

    def close(self, error: Exception) -> None:
        """Raise `error` in all waiting calls of `enter`."""
        for ticket in self._queue:
            if not ticket.done():
                ticket.set_exception(error)
        self._queue.clear()

    def _has_capacity(self) -> bool:
        return self._short < self._short_slots and self.live < self.maximum

    def _take(self) -> RunSlot:
        self.live += 1
        self._short += 1
        slot = RunSlot()
        slot.timer = asyncio.get_running_loop().call_later(SHORT_SECONDS, self._grow, slot)
        return slot

    def _grow(self, slot: RunSlot) -> None:
        slot.is_short = False
        self._short -= 1
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._has_capacity():
            ticket = self._queue.popleft()
            if not ticket.done():
                ticket.set_result(self._take())
