"""How many requests are under way, how fast new ones begin, and when one is made again."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest

from verl_tool.client import pacing
from verl_tool.client.pacing import BusyFault, Pacer, RateLimiter, retry_until, seconds_of
from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind

BROKEN = ToolFault(FaultKind.UNREACHABLE, "broken", retryable=True)
WRONG = ToolFault(FaultKind.MISCONFIGURED, "wrong", retryable=False)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that are waited for; nobody waits."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(pacing.asyncio, "sleep", sleep)
    return waited


def failing(*faults: ToolFault):
    left = list(faults)

    async def ask(seconds: float) -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return ask


async def test_pauses_grow_and_respect_retry_after(pauses: list[float]) -> None:
    faults = [BROKEN] * 7 + [BusyFault("busy", 30.0), BusyFault("busy", None)]
    assert await retry_until(failing(*faults), 100.0) == "answer"
    for n, waited in enumerate(pauses[:7]):
        assert 0.5 <= waited / min(0.5 * 2**n, 8.0) <= 1.5
    assert pauses[7] == 30.0
    assert pauses[8] <= 12.0


async def test_it_gives_up_at_once_where_nothing_mends_it_or_no_time_is_left(pauses: list[float]) -> None:
    with pytest.raises(ToolFault, match="wrong"):
        await retry_until(failing(BROKEN, WRONG), 100.0)
    assert len(pauses) == 1
    with pytest.raises(ToolFault, match="busy"):
        await retry_until(failing(BusyFault("busy", 101.0)), 100.0)
    assert len(pauses) == 1


async def test_after_a_pause_that_took_too_long_the_last_fault_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += 20.0

    async def ask(seconds: float) -> str:
        assert seconds > 0, "no request can be made in less than no time"
        raise BROKEN

    monkeypatch.setattr(pacing.asyncio, "sleep", sleep)
    with pytest.raises(ToolFault, match="broken"):
        await retry_until(ask, 30.0)
    assert now == 40.0


async def test_a_pace_spreads_requests_evenly_and_refuses_those_far_behind(pauses: list[float]) -> None:
    pace = RateLimiter(0.5)
    await asyncio.gather(*(pace.wait(10.0) for _ in range(4)))
    assert pauses == pytest.approx([0.0, 0.5, 1.0, 1.5], abs=0.2)
    with pytest.raises(asyncio.TimeoutError):
        await pace.wait(1.0)


def test_what_retry_after_may_say() -> None:
    assert (seconds_of("120"), seconds_of("0.1")) == (120.0, 0.1)
    soon = datetime.now(timezone.utc) + timedelta(seconds=60)
    assert seconds_of(format_datetime(soon, usegmt=True)) == pytest.approx(60, abs=5)
    assert seconds_of("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert [seconds_of(odd) for odd in (None, "", "soon", "-1", "²", "9" * 400)] == [None] * 6


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
