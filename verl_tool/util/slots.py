"""Wait in a queue of this machine, which is not part of the time of what waits.

The start of a container or a verifier may wait for many others. Deadlines of `pause_in_queue` stand still meanwhile,
and a server learns that an action waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Protocol


class Pausable(Protocol):
    """Something that stands still while its task waits in a queue."""

    def pause(self) -> None:
        """A wait begins."""

    def resume(self) -> None:
        """A wait has ended."""


_pausable: ContextVar[tuple[Pausable, ...]] = ContextVar("pausable", default=())


@contextmanager
def pause_in_queue(*each: Pausable) -> Iterator[None]:
    """Within the block, `wait_in_queue` pauses these, also in tasks that are started there."""
    token = _pausable.set((*_pausable.get(), *each))
    try:
        yield
    finally:
        _pausable.reset(token)


@contextmanager
def wait_in_queue() -> Iterator[None]:
    """The block waits in a queue."""
    paused = _pausable.get()
    for each in paused:
        each.pause()
    try:
        yield
    finally:
        for each in paused:
            each.resume()


@asynccontextmanager
async def hold_slot(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold one of `slots` within the block. They are given in the order of arrival."""
    if slots.locked():
        with wait_in_queue():
            await slots.acquire()
    else:
        await slots.acquire()
    try:
        yield
    finally:
        slots.release()
