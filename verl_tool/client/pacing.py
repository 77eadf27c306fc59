"""How many requests a client has under way, and how fast it begins new ones."""

from __future__ import annotations

import asyncio

from verl_tool.errors import ConfigError


class Pacer:
    """At most `max_workers` at a time, and at least `interval` seconds between the beginnings of two."""

    def __init__(self, max_workers: int, interval: float) -> None:
        if max_workers < 1 or interval < 0:
            raise ConfigError(
                f"max_workers is {max_workers} and request_interval is {interval}; "
                "the first must be at least 1, the second at least 0 seconds"
            )
        self._places = asyncio.Semaphore(max_workers)
        self._interval = interval
        self._next_beginning = 0.0

    async def begin(self, seconds: float) -> None:
        """Wait for a place and for the interval; `end` afterwards. Raises asyncio.TimeoutError after `seconds`."""
        if self._places.locked():
            await asyncio.wait_for(self._places.acquire(), seconds)
        else:
            await self._places.acquire()
        if not self._interval:
            return
        try:
            await self._wait_for_interval(seconds)
        except BaseException:
            self._places.release()
            raise

    def end(self) -> None:
        """Give the place back."""
        self._places.release()

    async def _wait_for_interval(self, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        mine = max(now, self._next_beginning)
        if mine - now > seconds:
            raise asyncio.TimeoutError
        self._next_beginning = mine + self._interval
        await asyncio.sleep(mine - now)
