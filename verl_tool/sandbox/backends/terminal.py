"""A program that goes on running in a container, such as a shell on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tty
from collections.abc import Callable

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends.resident_client import ResidentProgram
from verl_tool.sandbox.worker import RunStatus

_READ_BYTES = 1 << 16
_SIGKILLED = 9
_LAST_OUTPUT_SECONDS = 5.0
"""For the last output of a program that has ended to be read."""


class ContainerProgram:
    """Passes bytes between a program in a container and descriptors of this process, until the program ends."""

    def __init__(self, program: ResidentProgram, streams: tuple[int, int, int], terminal: bool) -> None:
        """streams: of the program; the caller may close them. terminal: they are one terminal, whose modes are the
        container's from now on."""
        self._program = program
        self._fds = [os.dup(fd) for fd in streams]
        for fd in self._fds:
            os.set_blocking(fd, False)
        if terminal:
            tty.setraw(self._fds[0])
        loop = asyncio.get_running_loop()
        readers = (program.stdout,) if terminal else (program.stdout, program.stderr)
        self._pumps = [loop.create_task(self._pump(reader, fd)) for reader, fd in zip(readers, self._fds[1:])]  # noqa: B905
        self._listen(loop)
        self._closing = loop.create_task(self._close())

    @property
    def running(self) -> bool:
        return self._program.running

    def kill(self) -> None:
        self._program.kill()

    async def wait(self) -> RunStatus:
        await asyncio.shield(self._closing)
        status = _SIGKILLED if self._program.status is None else self._program.status
        return RunStatus(True, True, None, status, 0.0, 0.0, 0, -1)

    async def foreground(self, number: signal.Signals | None = None) -> tuple[int, int]:
        """The program, and the process group in the foreground of its terminal, after a signal to that; 0 and 0 if that
        is not known, or the signal could not be sent."""
        with contextlib.suppress(SandboxError):
            return await self._program.signal_foreground(number or 0)
        return 0, 0

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.add_reader(self._fds[0], self._read)
        except PermissionError:  # a plain file
            while self._read():
                pass

    def _read(self) -> bool:
        try:
            data = os.read(self._fds[0], _READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # a terminal that its owner has closed
            data = b""
        if data:
            self._program.stdin.write(data)
        else:
            asyncio.get_running_loop().remove_reader(self._fds[0])
            self._program.stdin.close()
        return bool(data)

    async def _pump(self, reader: asyncio.StreamReader, fd: int) -> None:
        while data := await reader.read(_READ_BYTES):
            while data:
                try:
                    data = data[os.write(fd, data) :]
                except BlockingIOError:
                    await _ready(fd)
                except OSError:  # nobody reads it
                    break

    async def _close(self) -> None:
        await self._program.wait()
        await asyncio.wait(self._pumps, timeout=_LAST_OUTPUT_SECONDS)
        for pump in self._pumps:
            pump.cancel()
        await asyncio.wait(self._pumps)
        asyncio.get_running_loop().remove_reader(self._fds[0])
        for fd in self._fds:
            os.close(fd)


async def _ready(fd: int) -> None:
    """Return when it can be written to."""
    loop = asyncio.get_running_loop()
    writable = loop.create_future()
    resolve: Callable[[], None] = lambda: None if writable.done() else writable.set_result(None)  # noqa: E731
    loop.add_writer(fd, resolve)
    try:
        await writable
    finally:
        loop.remove_writer(fd)
