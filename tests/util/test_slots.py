"""Waiting for a slot, and deadlines that stand still meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest

from verl_tool.util.deadline import Deadline
from verl_tool.util.slots import hold_slot, pause_in_queue


class Meter:
    """Counts pauses."""

    def __init__(self) -> None:
        self.pauses = self.resumes = 0

    def pause(self) -> None:
        self.pauses += 1

    def resume(self) -> None:
        self.resumes += 1


async def stay(slots: asyncio.Semaphore, seconds: float) -> None:
    async with hold_slot(slots):
        await asyncio.sleep(seconds)


async def test_a_deadline_stands_still_in_the_queue_and_holds_afterwards() -> None:
    slots = asyncio.Semaphore(1)
    before = asyncio.create_task(stay(slots, 0.6))
    await asyncio.sleep(0)
    deadline = Deadline(0.3)
    began = time.monotonic()
    with pytest.raises(asyncio.TimeoutError), deadline, pause_in_queue(deadline):
        await stay(slots, 10)
    assert 0.8 < time.monotonic() - began < 5
    await before
    assert not slots.locked()


async def test_a_free_slot_pauses_nothing_and_a_cancelled_wait_is_resumed() -> None:
    slots, meter = asyncio.Semaphore(1), Meter()
    with pause_in_queue(meter):
        await stay(slots, 0)
        assert meter.pauses == 0
        async with hold_slot(slots):
            waiting = asyncio.create_task(stay(slots, 0))
            await asyncio.sleep(0.01)
            assert (meter.pauses, meter.resumes) == (1, 0)
            waiting.cancel()
            await asyncio.wait([waiting])
    assert (meter.pauses, meter.resumes) == (1, 1)
    await asyncio.wait_for(stay(slots, 0), 5)


async def test_deadlines_of_blocks_within_are_paused_as_well_until_their_block_ends() -> None:
    slots = asyncio.Semaphore(0)
    outer, inner = Deadline(0.2), Deadline(0.1)
    with outer, pause_in_queue(outer):
        with inner, pause_in_queue(inner):
            waiting = asyncio.create_task(stay(slots, 0))
            await asyncio.sleep(0.4)
            slots.release()
            await waiting
        assert 0.1 < outer.remaining_seconds <= 0.2


async def test_a_deadline_can_be_extended() -> None:
    deadline = Deadline(0.05)
    with deadline:
        deadline.extend(5)
        await asyncio.sleep(0.2)
        assert 4 < deadline.remaining_seconds < 5
        deadline.pause()
        deadline.extend(1)
        deadline.resume()
        assert 5 < deadline.remaining_seconds < 6
    assert deadline.seconds == pytest.approx(6.05)


async def test_a_deadline_that_was_left_cancels_nothing() -> None:
    deadline = Deadline(0.05)
    with deadline:
        deadline.pause()
    deadline.resume()
    deadline.extend(0.01)
    await asyncio.sleep(0.2)
