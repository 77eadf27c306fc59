"""How fast a client asks, how many requests it has under way, and when it asks again."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from itertools import count
from typing import TypeVar

from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import FaultKind

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
"""Seconds of the first pause and of the longest; each is twice the one before, and varied by a half."""
T = TypeVar("T")


class BusyFault(ToolFault):
    """The service asks to be left alone for a while."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(FaultKind.OVERLOADED, message, retryable=True)
        self.retry_after = retry_after
        """Seconds; None if it does not say how long."""


class RateLimiter:
    """At least `interval` seconds between the beginnings of two requests."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._next = 0.0

    async def wait(self, seconds: float) -> None:
        """Until it is this request's turn. Raises asyncio.TimeoutError at once if that is more than `seconds` away."""
        now = asyncio.get_running_loop().time()
        at = max(self._next, now)
        if at - now > seconds:
            raise asyncio.TimeoutError
        self._next = at + self._interval
        await asyncio.sleep(at - now)


class Pacer:
    """At most `max_workers` at a time, and at least `interval` seconds between the beginnings of two."""

    def __init__(self, max_workers: int, interval: float) -> None:
        if max_workers < 1 or interval < 0:
            raise ConfigError(
                f"max_workers is {max_workers} and request_interval is {interval}; "
                "the first must be at least 1, the second at least 0 seconds"
            )
        self._places = asyncio.Semaphore(max_workers)
        self._limiter = RateLimiter(interval) if interval else None

    async def begin(self, seconds: float) -> None:
        """Wait for a place and for the interval; `end` afterwards. Raises asyncio.TimeoutError after `seconds`."""
        if self._places.locked():
            await asyncio.wait_for(self._places.acquire(), seconds)
        else:
            await self._places.acquire()
        if self._limiter is None:
            return
        try:
            await self._limiter.wait(seconds)
        except BaseException:
            self._places.release()
            raise

    def end(self) -> None:
        """Give the place back."""
        self._places.release()


def doubling_pause(tries: int, requested: float) -> float:
    """Seconds to wait after so many tries, but at least those that the service asks for."""
    return max(min(FIRST_PAUSE * 2**tries, LONGEST_PAUSE) * random.uniform(0.5, 1.5), requested)


async def retry_until(
    ask: Callable[[float], Awaitable[T]],
    seconds: float,
    pause: Callable[[int, float], float] = doubling_pause,
    max_retries: float = float("inf"),
) -> T:
    """What `ask` returns. It is given the seconds that are left, and asked again after each retryable fault.

    Raises the last fault after `max_retries`, or if another try does not fit into `seconds`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    last: ToolFault | None = None
    for tries in count():
        left = deadline - loop.time()
        if last is not None and left <= 0:
            # The pause took longer than it should have, as on a busy machine.
            raise last
        try:
            return await ask(left)
        except ToolFault as fault:
            last = fault
            delay = pause(tries, (fault.retry_after or 0.0) if isinstance(fault, BusyFault) else 0.0)
            if not fault.retryable or tries >= max_retries or loop.time() + delay >= deadline:
                raise
        await asyncio.sleep(delay)
    raise AssertionError("not reached")


def seconds_of(retry_after: str | None) -> float | None:
    """Of the header ``Retry-After``: seconds or a date (RFC 9110, 10.2.3). None if it says nothing."""
    text = (retry_after or "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None
