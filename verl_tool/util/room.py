"""Wait for room on this machine, which is not part of the time of what waits.

A call, the start of a container or a verifier may wait for many others. Deadlines that are `paused_while_waiting` stand
still meanwhile, and a server learns that an action has not begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Protocol


class Pausable(Protocol):
    """What stands still while its task waits for room."""

    def pause(self) -> None:
        """A wait begins."""

    def resume(self) -> None:
        """It has ended."""


_pausable: ContextVar[tuple[Pausable, ...]] = ContextVar("pausable", default=())


@contextmanager
def paused_while_waiting(*paused: Pausable) -> Iterator[None]:
    """Within the block, `take` and `turn` pause these whenever they wait, also in tasks that are started there."""
    token = _pausable.set((*_pausable.get(), *paused))
    try:
        yield
    finally:
        _pausable.reset(token)


async def take(slots: asyncio.Semaphore) -> None:
    """Take one of `slots`, in the order of arrival. Release it afterwards."""
    paused = _pausable.get() if slots.locked() else ()
    for each in paused:
        each.pause()
    try:
        await slots.acquire()
    finally:
        for each in paused:
            each.resume()


@asynccontextmanager
async def turn(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of `slots` within the block."""
    await take(slots)
    try:
        yield
    finally:
        slots.release()
