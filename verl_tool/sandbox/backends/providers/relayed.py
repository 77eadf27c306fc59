"""A process whose streams the SDK of a service passes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

_RENEW_SECONDS = 60.0
_CALL_SECONDS = 60.0
"""For a call of a service that starts nothing."""
_SENT_BYTES = 1 << 18
"""At a time: services limit their messages."""
_BUFFERED_BYTES = 1 << 20


class RelayedProcess:
    """The first process of a container, whose streams an SDK passes on. See `PipedProcess`.

    Subclasses override the methods that speak to the service; `begin` it when they can.
    """

    lines = False

    def __init__(self) -> None:
        # The resident sends no more than was requested, so that a limit here would only end lines.
        self.stdout, self.stderr = asyncio.StreamReader(limit=1 << 40), asyncio.StreamReader(limit=1 << 40)
        self.stdin = RelayedInput(self.send)
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._removed = False

    async def send(self, data: bytes) -> None:
        """Send to its stdin."""
        raise NotImplementedError

    async def watch(self) -> None:
        """Return when it has ended. Pass on what it writes, unless the SDK calls back."""
        raise NotImplementedError

    async def renew(self) -> None:
        """Have the container live for another `remote.LEASE_SECONDS`."""

    async def remove(self) -> None:
        """End the container."""
        raise NotImplementedError

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(each) for each in (self._watch(), self._renew(), self._pump())]

    async def wait(self) -> None:
        await self._ended.wait()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close()
        if not self._removed:
            self._removed = True
            with contextlib.suppress(Exception):  # its lease ends
                await asyncio.wait_for(self.remove(), _CALL_SECONDS)

    async def _watch(self) -> None:
        try:
            await self.watch()
        except Exception as error:  # noqa: BLE001  (of an SDK: whatever it is, there is no more)
            self._fail(error)
        self._close()

    async def _pump(self) -> None:
        try:
            await self.stdin.pump()
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        self._close()  # closed by this side: `end` removes the container

    async def _renew(self) -> None:
        while True:
            # One that fails is repeated, and if all do, the container ends, which is seen by `watch`.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.renew(), _CALL_SECONDS)
            await asyncio.sleep(_RENEW_SECONDS)

    def _fail(self, error: Exception) -> None:
        if not self._ended.is_set():
            self.stderr.feed_data(f"{type(error).__name__}: {error}\n".encode(errors="replace"))

    def _close(self) -> None:
        if not self._ended.is_set():
            self.stdout.feed_eof()
            self.stderr.feed_eof()
            self._ended.set()


class RelayedInput:
    """Sends in order. See `ByteWriter`."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send, self._waiting = send, bytearray()
        self._written, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._closed = self._failed = False
        self.used = False
        """Whether something was written: the first line is the resident's program."""

    def write(self, data: bytes) -> None:
        self.used = True
        self._waiting += data
        self._written.set()
        if len(self._waiting) >= _BUFFERED_BYTES:
            self._has_room.clear()

    def close(self) -> None:
        self._closed = True
        self._written.set()

    async def drain(self) -> None:
        await self._has_room.wait()
        if self._failed:
            raise ConnectionError

    async def pump(self) -> None:
        """Send what is written, until it is closed. Raises what sending does."""
        try:
            while True:
                await self._written.wait()
                data = bytes(self._waiting[:_SENT_BYTES])
                del self._waiting[: len(data)]
                if len(self._waiting) < _BUFFERED_BYTES:
                    self._has_room.set()
                if data:
                    await self._send(data)
                elif self._closed:
                    return
                else:
                    self._written.clear()
        finally:
            self._failed = True
            self._has_room.set()
