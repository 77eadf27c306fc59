"""Asking a service that others ask too: not too fast, and again after a pause if it was busy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from itertools import count
from time import time
from typing import TypeVar

from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
"""Seconds of the first pause and of the longest; each is twice the one before, and varied by a half."""
T = TypeVar("T")


class BusyFault(ToolFault):
    """The service asks to be left alone for a while."""

    def __init__(self, message: str, retry_after: float | None) -> None:
        super().__init__(FaultKind.OVERLOADED, message, retryable=True)
        self.retry_after = retry_after
        """Seconds; None if it does not say how long."""


class RateLimiter:
    """At most `per_second` requests a second, evenly; None: as they come."""

    def __init__(self, per_second: float | None) -> None:
        self._interval = 1 / per_second if per_second else 0.0
        self._next = 0.0

    async def wait(self, seconds: float) -> None:
        """Until it is this request's turn. Raises ToolFault if that is more than `seconds` away."""
        now = asyncio.get_running_loop().time()
        at = max(self._next, now)
        if at - now > seconds:
            words = f"no turn within {seconds:.3g} s at one request each {self._interval:.3g} s (requests_per_second)"
            raise ToolFault(FaultKind.OVERLOADED, words, retryable=True)
        self._next = at + self._interval
        await asyncio.sleep(at - now)


async def retry_until(ask: Callable[[float], Awaitable[T]], seconds: float) -> T:
    """What `ask` returns. It is given the seconds that are left, and asked again after each retryable fault.

    The pause is at least what the service asks for. Raises the last fault if another try does not fit into `seconds`.
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
            pause = min(FIRST_PAUSE * 2**tries, LONGEST_PAUSE) * random.uniform(0.5, 1.5)
            if isinstance(fault, BusyFault) and fault.retry_after is not None:
                pause = max(pause, fault.retry_after)
            if not fault.retryable or loop.time() + pause >= deadline:
                raise
        await asyncio.sleep(pause)
    raise AssertionError("not reached")


def seconds_of(retry_after: str | None) -> float | None:
    """Of the header ``Retry-After``: seconds or a date (RFC 9110, 10.2.3). None if it says nothing."""
    text = (retry_after or "").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        return max(parsedate_to_datetime(text).timestamp() - time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None
