"""The Python state of a container: the client of `cell_server`, which runs in it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tool.sandbox.backends.inside import cell_server
from verl_tool.sandbox.backends.protocol import unusable
from verl_tool.sandbox.backends.resident_client import ResidentProgram
from verl_tool.sandbox.result import CellResult, written

if TYPE_CHECKING:
    from verl_tool.sandbox.backends.container import Container

_MARGIN_SECONDS = 10.0 + cell_server.START_SECONDS + cell_server.DIE_SECONDS
_OWN_CELL_SECONDS = 20.0
_NO_PYTHON = (126, 127)
"""Exit codes of a command that cannot be run."""


class Cells:
    """Runs cells in the container. The server is started for the first one."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._server: ResidentProgram | None = None
        self._cancelled = False
        """Whether the state was lost by a cancelled call, and no result has reported it yet."""

    def exhausted(self, limit: str) -> CellResult:
        """Return the result of a cell that is not run because a limit is used up."""
        return self._result({"state": "kept", "timed_out": False, "wall_seconds": 0.0}, limit)

    async def run(self, code: str, stdin: bytes, interactive: bool, counted: bool, seconds: float) -> CellResult:
        """Run a cell for `Container.run`. Raises SandboxError without python3, ToolFault after the container's end."""
        request = self._request(code, stdin, interactive, counted, seconds)
        if self._server is not None and self._server.returncode is not None:
            return await self._lost(self._server)
        if self._cancelled:
            self._cancelled = False
            return self._result({"state": "lost", "timed_out": False, "wall_seconds": 0.0}, None)
        if self._server is None:
            self._server = await self._start()
        try:
            answer = await asyncio.wait_for(self._request_value(self._server, request), seconds + _MARGIN_SECONDS)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            return await self._lost(self._server, seconds if isinstance(error, asyncio.TimeoutError) else None)
        except BaseException:
            # A late answer about this cell must not be mistaken for that of the next one.
            self._cancelled = True
            await asyncio.shield(self.stop())
            raise
        return self._result(answer, "wall_seconds" if answer["timed_out"] else None)

    def _request(self, code: str, stdin: bytes, interactive: bool, counted: bool, seconds: float) -> dict[str, Any]:
        return {
            "code": base64.b64encode(code.encode("utf-8", "surrogatepass")).decode(),
            "stdin": base64.b64encode(stdin).decode(),
            "interactive": interactive,
            "counted": counted,
            "seconds": seconds,
            "output_bytes": self._container.limits.output_bytes,
        }

    async def _start(self) -> ResidentProgram:
        """Start a server and run a first cell, so that later failures are due to the model's cells.

        Raises SandboxError if the image's python3 is missing or cannot run cells, ToolFault if the container has ended.
        """
        pristine = self._container.pristine
        server = await self._container.spawn_inside(("python3", "-u", "-c", _source()))
        answer: dict[str, Any] = {}
        try:
            request = self._request("pass", b"", False, False, _OWN_CELL_SECONDS)
            answer = await asyncio.wait_for(self._request_value(server, request), _OWN_CELL_SECONDS + _MARGIN_SECONDS)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(server.wait(), 1.0)
        finally:
            if answer.get("state") != "kept":
                server.kill()
        if answer.get("state") == "kept":
            return server
        self._container.require()
        if server.returncode in _NO_PYTHON:
            raise unusable("the image has no python3, which cells need", pristine)
        words = f"exit code {server.returncode}" if not answer else f"the cell's state was {answer['state']}"
        words = f"the image's python3 does not run cells ({words}); it must be 3.10 or newer"
        raise unusable(words, pristine, retryable=True)

    def forget(self) -> None:
        """The container ends the server. The state is gone."""
        self._server = None

    async def stop(self) -> None:
        """End the server. The state is lost."""
        server, self._server = self._server, None
        if server is not None:
            server.kill()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(server.wait(), cell_server.DIE_SECONDS)

    async def _request_value(self, server: ResidentProgram, request: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(request).encode()
        server.stdin.write(cell_server.LENGTH.pack(len(body)) + body)
        await server.stdin.drain()
        (length,) = cell_server.LENGTH.unpack(await server.stdout.readexactly(cell_server.LENGTH.size))
        answer: dict[str, Any] = json.loads(await server.stdout.readexactly(length))
        return answer

    async def _lost(self, server: ResidentProgram, seconds: float | None = None) -> CellResult:
        """Return the result of a cell whose server has exited, or did not answer within `seconds`."""
        timed_out = seconds is not None
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(server.wait(), 1.0)
        self._container.require()
        await self.stop()
        answer = {"state": "lost", "timed_out": timed_out, "wall_seconds": seconds or 0.0}
        return self._result(answer, "wall_seconds" if timed_out else None)

    def _result(self, answer: dict[str, Any], limit_hit: str | None) -> CellResult:
        out, err = (base64.b64decode(answer.get(name, "")) for name in ("stdout", "stderr"))
        exit_code, signal = _ending(answer, limit_hit)
        return CellResult(
            **written(out, err, int(answer.get("stdout_bytes", 0)), int(answer.get("stderr_bytes", 0))),
            exit_code=exit_code,
            signal=signal,
            limit_hit=limit_hit,
            wall_seconds=answer["wall_seconds"],
            state=answer["state"],
            ended_threads=int(answer.get("threads", 0)),
        )


def _ending(answer: dict[str, Any], limit_hit: str | None) -> tuple[int | None, int | None]:
    if limit_hit == "total_wall_seconds":
        return None, None
    if "exit_code" in answer:
        return int(answer["exit_code"]), None
    status = int(answer.get("wait_status", 9))
    return (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)


@cache
def _source() -> str:
    return Path(cell_server.__file__).read_text(encoding="utf-8")
