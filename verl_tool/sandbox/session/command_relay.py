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
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_tool.errors import VerlToolError
from verl_tool.sandbox.inside import wire

if TYPE_CHECKING:
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


class CommandRelay:
    """Runs commands of the programs of `requester` in `runner`, until a deadline."""

    def __init__(self, requester: Session, runner: Session, seconds: float) -> None:
        """`seconds` is the time until the deadline."""
        self._requester, self._runner = requester, runner
        self._deadline = time.monotonic() + seconds
        self._names: asyncio.Queue[str] = asyncio.Queue(_MAX_WAITING)
        self._text = b""
        self._pipe = -1
        self.fault: VerlToolError | None = None
        """The first failure of the sandbox to run a command."""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[CommandRelay]:
        """Answer requests within the block. Raises OSError if the requester has no pipe."""
        loop = asyncio.get_running_loop()
        # Opened for writing too, so that reading never reaches the end of the pipe.
        self._pipe = self._requester.own_files().open_pipe(f"{CALLS}/requests", os.O_RDWR)
        loop.add_reader(self._pipe, self._receive)
        task = loop.create_task(self._answer_all())
        try:
            yield self
        finally:
            loop.remove_reader(self._pipe)
            os.close(self._pipe)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._text = (self._text + os.read(self._pipe, _MAX_LINE_BYTES))[-_MAX_LINE_BYTES:]
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
            files = self._requester.own_files()
            with contextlib.suppress(OSError):  # the requester's disk is full
                files.write(f"{CALLS}/{name}.answer", json.dumps(answer).encode())
            with contextlib.suppress(OSError):  # the program no longer waits
                pipe = files.open_pipe(f"{CALLS}/{name}.ready", os.O_WRONLY)
                try:
                    os.write(pipe, b"\n")
                finally:
                    os.close(pipe)

    async def _answer(self, name: str) -> dict[str, object]:
        try:
            content = self._requester.own_files().read(f"{CALLS}/{name}.request")
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
