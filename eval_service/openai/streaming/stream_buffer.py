"""What is to be sent to a client that reads a stream: bounded, so that a slow reader slows the writers."""

from __future__ import annotations

import asyncio


class StreamBuffer:
    """Many writers, one reader. `max_bytes`: beyond it, writers wait."""

    def __init__(self, max_bytes: int = 64 << 10) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._bytes = 0
        self._closed = False
        self._last_put = 0.0
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def put(self, part: bytes) -> None:
        """Add `part`, and wait until there is room for more."""
        self._parts.append(part)
        self._bytes += len(part)
        self._last_put = asyncio.get_running_loop().time()
        self._filled.set()
        if self._bytes > self._max_bytes:
            self._room.clear()
            await self._room.wait()

    async def keep_putting(self, part: bytes, seconds: float) -> None:
        """Add `part` whenever nothing was added for so long. Never returns; cancel it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            left = max(began, self._last_put) + seconds - loop.time()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self.put(part)

    def close(self) -> None:
        self._closed = True
        self._filled.set()

    async def take(self) -> bytes:
        """All that waits, in order; empty once the buffer is closed and empty."""
        while not self._parts and not self._closed:
            self._filled.clear()
            await self._filled.wait()
        parts, self._parts, self._bytes = b"".join(self._parts), [], 0
        self._room.set()
        return parts
