"""How many requests are under way, and how fast new ones begin."""

from __future__ import annotations

import asyncio

import pytest

from verl_tool.client.pacing import Pacer


async def test_a_place_is_given_back_and_waited_for() -> None:
    pacer = Pacer(1, 0.0)
    await pacer.begin(1.0)
    waiter = asyncio.create_task(pacer.begin(5.0))
    await asyncio.sleep(0.01)
    assert not waiter.done()
    pacer.end()
    await waiter


async def test_waiting_ends_at_the_deadline_and_takes_no_place() -> None:
    pacer = Pacer(1, 0.0)
    await pacer.begin(1.0)
    with pytest.raises(asyncio.TimeoutError):
        await pacer.begin(0.05)
    pacer.end()
    await pacer.begin(0.05)


async def test_beginnings_keep_their_distance() -> None:
    pacer = Pacer(10, 0.05)
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(pacer.begin(5.0) for _ in range(5)))
    assert asyncio.get_running_loop().time() - began >= 0.2


async def test_a_beginning_beyond_the_deadline_is_refused_and_takes_no_place() -> None:
    pacer = Pacer(2, 10.0)
    await pacer.begin(1.0)
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            await pacer.begin(1.0)
