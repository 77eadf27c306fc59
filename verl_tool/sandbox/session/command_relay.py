"""Run commands in one session for programs of another, which is isolated from it (`inside.verifier.in_workspace`).

A program of the requesting session writes ``NAME.request`` to a folder of its session and ``NAME`` to a named pipe. It
reads the pipe ``NAME.ready`` to wait for ``NAME.answer``. Both files are JSON. The command runs in the other session,
with the user and limits of that session.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_tool.errors import VerlToolError
from verl_tool.sandbox.inside import wire

if TYPE_CHECKING:
    from verl_tool.sandbox.backends.protocol import Sandbox
    from verl_tool.sandbox.result import RunResult
    from verl_tool.sandbox.session.session import Session

CALLS = f"{wire.VERIFIER_DIRECTORY}/calls"
"""Folder of requests, answers and the pipe ``requests``."""
_NAME = re.compile(r"[0-9a-f]{32}")
_MAX_WAITING = 256
"""Maximum number of waiting requests. Further ones are dropped."""
_MAX_LINE_BYTES = 1 << 16
"""Maximum number of bytes that are read from the pipe at once."""


class _Request(BaseModel):
    """A request, as `in_workspace.run` writes it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    command: str | list[str] = Field(min_length=1)
    stdin: str
    files: dict[str, str]
    read: list[str]
    env: dict[str, str]
    cwd: str
    seconds: float = Field(gt=0)


class RequestFolder(Protocol):
    """The folder of requests, as the sandbox has it that they are made in."""

    def listening(self, receive: Callable[[bytes], None]) -> AbstractAsyncContextManager[None]:
        """Call `receive` with what is written to the pipe, within the block. Raises OSError if there is no pipe."""

    async def read(self, name: str) -> bytes:
        """Read a file. Raises OSError."""

    async def write(self, name: str, content: bytes) -> None:
        """Write a file. Raises OSError."""

    async def notify(self, name: str) -> None:
        """Write a line to a pipe that a program reads. Raises OSError if none does."""


class SessionRequestFolder:
    """Those of a session, whose files are reached without its programs."""

    def __init__(self, session: Session, folder: str) -> None:
        self._session, self._folder = session, folder

    @contextlib.asynccontextmanager
    async def listening(self, receive: Callable[[bytes], None]) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        # Opened for writing too, so that reading never reaches the end of the pipe.
        pipe = self._session.own_files().open_pipe(f"{self._folder}/requests", os.O_RDWR)

        def take() -> None:
            with contextlib.suppress(BlockingIOError):
                receive(os.read(pipe, _MAX_LINE_BYTES))

        loop.add_reader(pipe, take)
        try:
            yield
        finally:
            loop.remove_reader(pipe)
            os.close(pipe)

    async def read(self, name: str) -> bytes:
        return self._session.own_files().read(f"{self._folder}/{name}")

    async def write(self, name: str, content: bytes) -> None:
        self._session.own_files().write(f"{self._folder}/{name}", content)

    async def notify(self, name: str) -> None:
        pipe = self._session.own_files().open_pipe(f"{self._folder}/{name}", os.O_WRONLY)
        try:
            os.write(pipe, b"\n")
        finally:
            os.close(pipe)


class CommandRelay:
    """Runs commands that are requested in a folder, in another sandbox, until a deadline."""

    def __init__(self, requests: RequestFolder, runner: Sandbox, seconds: float) -> None:
        """`seconds` is the time until the deadline."""
        self._requests, self._runner = requests, runner
        self._deadline = time.monotonic() + seconds
        self._names: asyncio.Queue[str] = asyncio.Queue(_MAX_WAITING)
        self._text = b""
        self.fault: VerlToolError | None = None
        """The first failure of the sandbox to run a command."""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[CommandRelay]:
        """Answer requests within the block. Raises OSError if there is no pipe."""
        async with self._requests.listening(self._receive):
            task = asyncio.get_running_loop().create_task(self._answer_all())
            try:
                yield self
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _receive(self, data: bytes) -> None:
        self._text = (self._text + data)[-_MAX_LINE_BYTES:]
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            name = line.decode("ascii", "replace")
            if _NAME.fullmatch(name):
                with contextlib.suppress(asyncio.QueueFull):
                    self._names.put_nowait(name)

    async def _answer_all(self) -> None:
        while True:
            name = await self._names.get()
            answer = await self._answer(name)
            with contextlib.suppress(OSError):  # the requester's disk is full
                await self._requests.write(f"{name}.answer", json.dumps(answer).encode())
            with contextlib.suppress(OSError):  # the program no longer waits
                await self._requests.notify(f"{name}.ready")

    async def _answer(self, name: str) -> dict[str, object]:
        try:
            content = await self._requests.read(f"{name}.request")
            request = await asyncio.to_thread(_Request.model_validate_json, content)
            return await self._run(request)
        except ValidationError as error:
            problem = error.errors()[0]
            return {"error": f"the request at {problem['loc']}: {problem['msg']}"}
        except (OSError, ValueError) as error:
            return {"error": f"the workspace cannot do that: {error}"}
        except VerlToolError as error:
            self.fault = self.fault or error
            return {"error": f"the sandbox failed: {error}"}

    async def _run(self, request: _Request) -> dict[str, object]:
        for path, content in request.files.items():
            await self._runner.write_file(path, base64.b64decode(content))
        result = await self._runner.exec(
            request.command,
            stdin=base64.b64decode(request.stdin),
            wall_seconds=max(0.01, min(request.seconds, self._deadline - time.monotonic())),
            env=request.env,
            cwd=request.cwd,
        )
        return _describe(result) | {"files": {path: await self._content(path) for path in request.read}}

    async def _content(self, path: str) -> str | None:
        try:
            return _base64(await self._runner.read_file(path))
        except OSError:
            return None


def _describe(result: RunResult) -> dict[str, object]:
    return {
        "exit_code": result.exit_code,
        "limit_hit": result.limit_hit or (None if result.exit_code is not None else f"signal {result.signal}"),
        "stdout": _base64(result.stdout_raw),
        "stderr": _base64(result.stderr_raw),
        "truncated": result.stdout_truncated,
    }


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
