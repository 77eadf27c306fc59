"""MCP over the stdin and stdout of a program: a line is a message.

The SDK's own transport starts the program with part of our environment, and holds a line of any length; this one takes
a program from the sandbox, and bounds what it sends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter
from pydantic import ValidationError

from verl_tool.sandbox.sandboxed_service import RunningService
from verl_tool.servers.mcp.bounds import Budget, TooMuchError
from verl_tool.util.json_text import BadJsonError, decode_request_json

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

_STDERR_BYTES = 4096
"""Of what a program writes to stderr, the end that is kept for messages about it."""
_WRITE_SECONDS = 10.0
"""For a program to read what it is sent."""
_BEYOND_LIMITS = ("the body holds", "the body is nested")
"""How the errors of JSON begin that is too much, and not merely wrong."""


class StdioLink:
    """The program behind one client."""

    def __init__(
        self, spawn: Callable[[], Awaitable[RunningService]], budget: Budget, grace_seconds: float = 0.0
    ) -> None:
        self._spawn, self._budget, self._grace = spawn, budget, grace_seconds
        self._stderr = b""
        self._why = ""
        self.ended = False
        """Whether it will send nothing more."""

    def last_words(self) -> str:
        """Why it ended, and the end of what it wrote to stderr; may be empty."""
        text = self._stderr.decode(errors="replace").strip()
        return "; ".join(part for part in (self._why, text[-1000:]) if part)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportStreams]:
        """As a transport of the SDK. Raises ConfigError or SandboxError if the program cannot be started."""
        running = await self._spawn()
        # What comes is read at once or not at all: the pipe is the buffer.
        to_us, incoming = anyio.create_memory_object_stream[Any](0)
        outgoing, from_us = anyio.create_memory_object_stream[Any](0)
        tasks = [
            asyncio.create_task(self._read(running, to_us)),
            asyncio.create_task(self._write(running, from_us, to_us)),
            asyncio.create_task(self._listen(running)),
        ]
        try:
            yield incoming, outgoing
        finally:
            try:
                await running.end(self._grace)
                # What it said last is often why.
                await asyncio.wait(tasks[2:], timeout=0.2)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                for stream in (to_us, incoming, outgoing, from_us):
                    stream.close()

    async def _read(self, running: RunningService, to_us: Any) -> None:
        stdout = running.process.stdout
        assert stdout is not None
        try:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                while line := await stdout.readline():
                    self._budget.take(len(line))
                    message = _message(line)
                    if message is not None:
                        await to_us.send(message)
                self._why = self._why or "the program has ended"
        except (TooMuchError, ValueError, OSError) as error:
            # ValueError: a line above the limit of the stream.
            self._why = str(error) if isinstance(error, TooMuchError) else f"its output cannot be read: {error}"
        finally:
            self.ended = True
            to_us.close()

    async def _write(self, running: RunningService, from_us: Any, to_us: Any) -> None:
        stdin = running.process.stdin
        assert stdin is not None
        try:
            async for each in from_us:
                text: str = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                stdin.write(text.encode() + b"\n")
                await asyncio.wait_for(stdin.drain(), _WRITE_SECONDS)
        except (OSError, asyncio.TimeoutError) as error:
            self._why = self._why or f"it does not read what it is sent: {error!r}"
            self.ended = True
            to_us.close()

    async def _listen(self, running: RunningService) -> None:
        stderr = running.process.stderr
        assert stderr is not None
        while part := await stderr.read(_STDERR_BYTES):
            self._stderr = (self._stderr + part)[-_STDERR_BYTES:]


def _message(line: bytes) -> SessionMessage | None:
    """None for what is no message: programs print, though they should not. Raises TooMuchError."""
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        value = decode_request_json(line)
        return SessionMessage(jsonrpc_message_adapter.validate_python(value, by_name=False))
    except BadJsonError as error:
        if str(error).startswith(_BEYOND_LIMITS):
            raise TooMuchError(str(error).replace("the body", "a message", 1)) from None
        return None
    except (ValidationError, RecursionError):
        return None
