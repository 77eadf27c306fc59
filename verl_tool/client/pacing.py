"""Limit the rate and the number of a client's requests, and retry them."""

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
"""First and longest pause in seconds. Each pause is twice the previous one, with a jitter of one half."""
T = TypeVar("T")


class BusyFault(ToolFault):
    """The service is busy and must not be called for a while."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(FaultKind.OVERLOADED, message, retryable=True)
        self.retry_after = retry_after
        """Seconds to wait; None if the service does not say."""


class RateLimiter:
    """Starts requests at least `interval` seconds apart."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._next = 0.0

    async def wait(self, seconds: float) -> None:
        """Wait for this request's turn. Raises asyncio.TimeoutError at once if it is more than `seconds` away."""
        now = asyncio.get_running_loop().time()
        at = max(self._next, now)
        if at - now > seconds:
            raise asyncio.TimeoutError
        self._next = at + self._interval
        await asyncio.sleep(at - now)


class Pacer:
    """Runs at most `max_workers` requests concurrently, and starts them at least `interval` seconds apart."""

    def __init__(self, max_workers: int, interval: float) -> None:
        if max_workers < 1 or interval < 0:
            raise ConfigError(
                f"max_workers is {max_workers} and request_interval is {interval}; "
                "the first must be at least 1, the second at least 0 seconds"
            )
        self._slots = asyncio.Semaphore(max_workers)
        self._limiter = RateLimiter(interval) if interval else None

    async def begin(self, seconds: float) -> None:
        """Wait for a slot and for the interval. Call `end` afterwards. Raises asyncio.TimeoutError after `seconds`."""
        if self._slots.locked():
            await asyncio.wait_for(self._slots.acquire(), seconds)
        else:
            await self._slots.acquire()
        if self._limiter is None:
            return
        try:
            await self._limiter.wait(seconds)
        except BaseException:
            self._slots.release()
            raise

    def end(self) -> None:
        """Release the slot."""
        self._slots.release()


def doubling_pause(tries: int, requested: float) -> float:
    """Return the seconds to wait after `tries` attempts: at least `requested`, the delay that the service asks for."""
    return max(min(FIRST_PAUSE * 2**tries, LONGEST_PAUSE) * random.uniform(0.5, 1.5), requested)


async def retry_until(
    ask: Callable[[float], Awaitable[T]],
    seconds: float,
    pause: Callable[[int, float], float] = doubling_pause,
    max_retries: float = float("inf"),
) -> T:
    """Call `ask` with the remaining seconds, retry it after each retryable fault, and return its result.

    Raises the last fault after `max_retries`, or if another attempt does not fit into `seconds`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    last: ToolFault | None = None
    for tries in count():
        left = deadline - loop.time()
        if last is not None and left <= 0:
            # The pause took longer than planned, for example on a busy machine.
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
    """Parse the header ``Retry-After``: seconds or a date (RFC 9110, 10.2.3). Returns None if it is neither."""
    text = (retry_after or "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None
