"""The server's side of a container's resident process: requests, and the streams of programs (`inside.resident`)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends.inside import resident

if TYPE_CHECKING:
    from verl_tool.sandbox.backends.providers.protocol import ByteWriter

_HEAD = resident.HEAD
_READER_BYTES = 1 << 16
_WAITING_BYTES = 1 << 20
"""Of a connection, that its program has not taken."""


class ResidentExitedError(SandboxError):
    """The resident process has exited, or its container."""

    def __init__(self) -> None:
        super().__init__("the container has ended", retryable=True)


@cache
def _source() -> str:
    return Path(resident.__file__).read_text(encoding="utf-8")


class ResidentClient:
    """Speaks to one resident process over its stdin and stdout. Requests may be made at the same time."""

    def __init__(self, reader: asyncio.StreamReader, writer: ByteWriter, lines: bool = False) -> None:
        """lines: frames are lines of base64, for what passes text only."""
        self._reader, self._writer, self._lines = reader, writer, lines
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._programs: dict[int, ResidentProgram] = {}
        self._task: asyncio.Task[None] | None = None
        self._accept: Callable[[ResidentProgram], None] | None = None
        self.user = (0, 0)
        """Numbers of the programs' user and group."""
        self.groups: tuple[int, ...] = ()
        """Numbers of all of its groups."""

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def programs(self) -> int:
        """How many programs of `spawn` run."""
        return sum(number > 0 for number in self._programs)

    async def begin(self, settings: Mapping[str, Any]) -> None:
        """Send the program with the arguments of its `main`, and wait until it is ready. Raises ResidentExitedError if
        it does not start, ValueError if something else answers, SandboxError if it cannot work as it has to."""
        arguments = {**settings, "lines": self._lines}
        line = f"names = {{'__name__': 'resident'}}; exec({_source()!r}, names); names['main'](**{arguments!r})\n"
        self._writer.write(line.encode())
        header, _ = await self._frame()
        if "reason" in header:
            raise SandboxError(f"the container cannot be used: {header['reason']}", retryable=False)
        if not header.get("ready"):
            raise ResidentExitedError
        self.user, self.groups = tuple(header["user"]), tuple(header["groups"])
        self._task = asyncio.get_running_loop().create_task(self._receive())

    async def ask(self, operation: str, payload: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a request. Raises OSError if it says so, ResidentExitedError. A request that is
        cancelled goes on: `kill` it."""
        number = next(self._numbers)
        return await self.request(number, operation, payload, **fields)

    def number(self) -> int:
        """A new number for a request."""
        return next(self._numbers)

    async def request(
        self, number: int, operation: str, payload: bytes = b"", **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """`ask` with a number, by which others may refer to what it starts."""
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self.send({"id": number, "op": operation, **fields}, payload)
            header, content = await answer
        finally:
            self._waiting.pop(number, None)
        if "error" in header:
            raise OSError(header["error"], os.strerror(header["error"]))
        return header, content

    async def send(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send without waiting for an answer. Raises ResidentExitedError."""
        if not self.alive:
            raise ResidentExitedError
        self.post(header, payload)
        try:
            await self.drain()
        except ConnectionError:
            raise ResidentExitedError from None

    async def drain(self) -> None:
        """Wait until it takes more. Raises ConnectionError."""
        await self._writer.drain()

    def post(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send soon. Nothing happens if the pipe is closed, which `drain` tells."""
        with contextlib.suppress(RuntimeError):  # uvloop's, of a transport that is closed
            self._writer.write(resident.encode(header, payload, self._lines))

    async def spawn(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        terminal: bool = False,
        line_bytes: int = 0,
        python: str | None = None,
    ) -> ResidentProgram:
        """Start a program on pipes, or on a terminal. line_bytes: the longest line that is read from it. python: code
        in place of arguments. Raises OSError if no process can be started, ResidentExitedError."""
        number = next(self._numbers)
        program = self._programs[number] = ResidentProgram(self, number, line_bytes or _READER_BYTES)
        try:
            program_fields: dict[str, Any] = {"argv": list(arguments), "env": dict(env), "cwd": cwd, "python": python}
            await self.request(number, "spawn", terminal=terminal, **program_fields)
        except OSError:
            del self._programs[number]
            raise
        except BaseException:
            if self.alive:
                self.post({"id": 0, "op": "kill", "of": number})
            raise
        return program

    async def listen(self, port: int, accept: Callable[[ResidentProgram], None]) -> None:
        """Call `accept` with each connection that a program makes to a port of the container's loopback device: what it
        sends is its stdout, what it receives its stdin. Raises OSError if the port is taken, ResidentExitedError."""
        self._accept = accept
        await self.ask("listen", port=port)

    async def close(self) -> None:
        """Close its stdin, at which it exits."""
        self._writer.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._lose_all()

    async def _receive(self) -> None:
        try:
            while True:
                header, payload = await self._frame()
                if "connected" in header and self._accept is not None:
                    connection = self._programs[header["id"]] = ResidentProgram(self, header["id"], _READER_BYTES)
                    self._accept(connection)
                    continue
                program = self._programs.get(header["id"])
                if program is not None and ("output" in header or "status" in header or "fed" in header):
                    program.receive(header, payload)
                    if "status" in header:
                        del self._programs[header["id"]]
                    continue
                answer = self._waiting.get(header["id"])
                if answer is not None and not answer.done():
                    answer.set_result((header, payload))
        except (ResidentExitedError, ValueError):
            self._lose_all()

    async def _frame(self) -> tuple[dict[str, Any], bytes]:
        try:
            if self._lines:
                return resident.decode(base64.b64decode(await self._reader.readuntil(b"\n"), validate=False))
            head, body = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            header: dict[str, Any] = json.loads(await self._reader.readexactly(head))
            return header, await self._reader.readexactly(body) if body else b""
        except struct.error as error:
            raise ValueError("this is no frame") from error
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            raise ResidentExitedError from None

    def _lose_all(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ResidentExitedError())
        for program in self._programs.values():
            program.receive({"status": None}, b"")
        self._programs.clear()


class ResidentProgram:
    """A program in progress, with the streams of an `asyncio.subprocess.Process`."""

    def __init__(self, client: ResidentClient, number: int, line_bytes: int) -> None:
        self._client, self._number = client, number
        self.stdin = ProgramInput(client, number)
        self._windows = {stream: _Window(client, number, stream) for stream in (1, 2)}
        self._readers = {stream: asyncio.StreamReader(limit=line_bytes) for stream in (1, 2)}
        for stream, reader in self._readers.items():
            reader.set_transport(self._windows[stream])
        self._ended = asyncio.Event()
        self.status: int | None = None
        """Exit status as in `os.waitpid`; None while it runs, and if its container has ended."""

    @property
    def stdout(self) -> asyncio.StreamReader:
        return self._readers[1]

    @property
    def stderr(self) -> asyncio.StreamReader:
        return self._readers[2]

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    @property
    def returncode(self) -> int | None:
        """As of `subprocess.Popen`: the exit code, or the negative number of a signal; -9 after its container's end."""
        if self.running:
            return None
        status = 9 if self.status is None else self.status
        return -(status & 0x7F) if status & 0x7F else status >> 8

    async def wait(self) -> int:
        """Wait until it and all that it started have ended, and return `returncode`."""
        await self._ended.wait()
        code = self.returncode
        assert code is not None
        return code

    def kill(self) -> None:
        """End it with all processes that it started. Does not wait."""
        if self.running and self._client.alive:
            self._client.post({"id": 0, "op": "kill", "of": self._number})

    async def signal_foreground(self, number: int) -> tuple[int, int]:
        """The leader of its terminal's session and the process group in the foreground, after a signal (0: none) to
        that; 0 and 0 if it was not sent. SIGKILL is not sent to the leader's own group."""
        header, _ = await self._client.ask("signal", of=self._number, signal=number)
        leader, group = header["groups"]
        return leader, group

    def receive(self, header: Mapping[str, Any], payload: bytes) -> None:
        """Take a frame about it."""
        if "fed" in header:
            self.stdin.fed(header["fed"])
            return
        if "output" in header:
            stream = header["output"]
            if not payload:
                self._readers[stream].feed_eof()
                return
            self._windows[stream].add(len(payload))
            self._readers[stream].feed_data(payload)
            self._windows[stream].give()
            return
        self.status = header["status"]
        self.stdin.fed(self.stdin._waiting)
        for reader in self._readers.values():
            reader.feed_eof()
        self._ended.set()


class ProgramInput:
    """The stdin of a program."""

    def __init__(self, client: ResidentClient, number: int) -> None:
        self._client, self._header = client, {"id": 0, "op": "input", "of": number}
        self._closed = False
        self._is_connection, self._waiting = number < 0, 0
        self._has_room = asyncio.Event()

    def write(self, data: bytes) -> None:
        if data and not self._closed and self._client.alive:
            self._waiting += len(data)
            self._client.post(self._header, data)

    async def drain(self) -> None:
        """Wait until the container takes more, and of a connection, until its program has. Raises ConnectionError."""
        await self._client.drain()
        while self._is_connection and self._waiting > _WAITING_BYTES and not self._closed and self._client.alive:
            self._has_room.clear()
            await self._has_room.wait()

    def fed(self, size: int) -> None:
        """So many bytes were taken."""
        self._waiting -= size
        self._has_room.set()

    def close(self) -> None:
        if not self._closed and self._client.alive:
            self._client.post(self._header)
        self._closed = True


class _Window(asyncio.ReadTransport):
    """Reports what a reader has room for."""

    def __init__(self, client: ResidentClient, number: int, stream: int) -> None:
        super().__init__()
        self._client, self._header = client, {"id": 0, "op": "taken", "of": number, "stream": stream}
        self._bytes, self._paused = 0, False

    def add(self, size: int) -> None:
        self._bytes += size

    def give(self) -> None:
        if self._bytes and not self._paused and self._client.alive:
            self._client.post({**self._header, "bytes": self._bytes})
            self._bytes = 0

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self.give()
