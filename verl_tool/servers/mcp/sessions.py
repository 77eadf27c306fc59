"""The clients of one MCP server in one replica: one for all trajectories, or one for each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_tool.errors import ConfigError, IsolationError, SandboxError, ToolFault, VerlToolError
from verl_tool.protocol import FaultKind
from verl_tool.sandbox import Level, Limits
from verl_tool.sandbox.sandboxed_service import RunningService, SandboxedService, ServiceSandbox
from verl_tool.servers.mcp.bounds import MAX_MESSAGE_BYTES, Budget
from verl_tool.servers.mcp.config import McpServer
from verl_tool.servers.mcp.connection import Connection, Link, Unreachable
from verl_tool.servers.mcp.http_link import HttpLink
from verl_tool.servers.mcp.stdio import StdioLink

if TYPE_CHECKING:
    from mcp_types import CallToolResult, Tool

log = logging.getLogger(__name__)

_STARTS = 8
"""Clients of one server that connect at a time."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""After a client that could not connect, the next is tried later and later."""
_GRACE_SECONDS = 1.0
"""For a program outside the sandbox to end by itself."""


class McpSessions:
    """`isolation`: the lowest level to accept for a program in the sandbox; None: the sandbox's own default."""

    def __init__(self, name: str, server: McpServer, isolation: str | None = None) -> None:
        self.name, self._server = name, server
        limits = Limits(memory_bytes=server.max_memory_mb << 20, processes=64)
        self._sandbox = ServiceSandbox(limits, Level.parse(isolation or Level.full))
        self._users = 0
        self._shared: Connection | None = None
        self._connecting = asyncio.Lock()
        self._starts = asyncio.Semaphore(_STARTS)
        self._open: set[Connection] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._pause, self._not_before = _FIRST_PAUSE_SECONDS, 0.0

    def isolation_in_force(self) -> str:
        """How its program is confined, in words; empty if there is none, or it is not in the sandbox."""
        return self._sandbox.describe()

    async def start(self) -> None:
        """Look whether the server can be reached; once for all its tools. Raises ConfigError or Unreachable."""
        if self._users == 0:
            try:
                connection = await self._connected()
            except VerlToolError:
                await self.close()
                raise
            if self._server.stateful:
                await self._drop(connection)
            else:
                self._shared = connection
        self._users += 1

    async def stop(self) -> None:
        """One of its tools stops; with the last one all ends."""
        self._users -= 1
        if self._users <= 0:
            await self.close()

    async def close(self) -> None:
        """End all clients and programs."""
        self._shared = None
        await asyncio.gather(*(self._drop(connection) for connection in list(self._open)), *self._leaving)
        await self._sandbox.close()

    async def listed(self) -> list[Tool]:
        """What the server offers. Raises ConfigError or Unreachable."""
        connection = await self._connected()
        try:
            return await connection.list_tools()
        finally:
            await self._drop(connection)

    async def new(self) -> Connection:
        """A trajectory's own client. `leave` it.

        Raises ToolFault: ``unreachable``, or ``overloaded`` if there are too many.
        """
        if len(self._open) >= self._server.max_sessions:
            words = (
                f"MCP server {self.name} has max_sessions={self._server.max_sessions} clients in this replica; try "
                "later, or raise that in the MCP config"
            )
            raise ToolFault(FaultKind.OVERLOADED, words, retryable=True)
        return await self._reached()

    async def leave(self, connection: Connection) -> None:
        """The trajectory is over."""
        await self._drop(connection)

    async def call(self, own: Connection | None, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool by the trajectory's own client, or by that of all.

        Raises AnswerError and ToolFault as `Connection.call`; ``tool_crashed`` if the trajectory's client is gone, for
        what its earlier calls did may have brought that about.
        """
        connection = own or await self._for_all()
        if not connection.usable:
            words = f"MCP server {self.name}: the client of this trajectory has ended; start it again as a new one"
            raise ToolFault(FaultKind.TOOL_CRASHED, words, retryable=False)
        try:
            return await connection.call(tool, arguments)
        finally:
            if not connection.usable:
                self._retire(connection)

    async def _for_all(self) -> Connection:
        """The client of all trajectories, connected anew if it has ended. Raises ToolFault ``unreachable``."""
        async with self._connecting:
            if self._shared is not None and self._shared.usable:
                return self._shared
            exited, self._shared = self._shared, None
            if exited is not None:
                self._retire(exited)
            self._shared = await self._reached()
            return self._shared

    async def _reached(self) -> Connection:
        """A new client. Raises ToolFault: nothing was sent, so the step may be sent again."""
        left = self._not_before - time.monotonic()
        if left > 0:
            words = f"MCP server {self.name} could not be reached; it is tried again in {left:.1f} s"
            raise ToolFault(FaultKind.UNREACHABLE, words, retryable=True)
        try:
            connection = await self._connected()
        except VerlToolError as error:
            self._not_before = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
            raise ToolFault(FaultKind.UNREACHABLE, str(error), retryable=True) from error
        self._pause = _FIRST_PAUSE_SECONDS
        return connection

    async def _connected(self) -> Connection:
        budget, server = Budget(), self._server
        connection = Connection(
            self.name,
            self._link(budget),
            budget,
            start_seconds=server.start_seconds,
            timeout_seconds=server.timeout_seconds,
        )
        self._open.add(connection)
        try:
            async with self._starts:
                await connection.open()
        except BaseException as error:
            self._open.discard(connection)
            if isinstance(error, (SandboxError, IsolationError)):
                raise Unreachable(f"MCP server {self.name} cannot be started: {error}") from error
            if isinstance(error, Unreachable) and self._server.command is not None and self._server.sandbox:
                raise Unreachable(f"{error}; {_way_out(self._server.args, self._server.readable)}") from error
            raise
        return connection

    def _link(self, budget: Budget) -> Link:
        server = self._server
        if server.url is not None:
            return HttpLink(server.url, server.headers, budget, sse=server.transport == "sse")
        return StdioLink(self._spawn, budget, 0.0 if server.sandbox else _GRACE_SECONDS)

    async def _spawn(self) -> RunningService:
        server = self._server
        assert server.command is not None
        service = SandboxedService(
            (server.command, *server.args), server.env, server.cwd, server.readable, sandboxed=server.sandbox
        )
        try:
            return await self._sandbox.spawn(service, MAX_MESSAGE_BYTES)
        except IsolationError as error:
            raise ConfigError(f'{error}; or give the server "sandbox": false') from error

    def _retire(self, connection: Connection) -> None:
        """Leave a client once its last call is answered."""
        task = asyncio.create_task(self._leave_later(connection))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave_later(self, connection: Connection) -> None:
        deadline = time.monotonic() + self._server.timeout_seconds
        while connection.running and time.monotonic() < deadline:  # noqa: ASYNC110  # two things end the wait
            await asyncio.sleep(0.1)
        await self._drop(connection)

    async def _drop(self, connection: Connection) -> None:
        with contextlib.suppress(KeyError):
            self._open.remove(connection)
            await connection.close()


def _way_out(args: Sequence[str], readable: Sequence[str]) -> str:
    """What a program in the sandbox may lack that ends before it answers, or never does, and how to give it that."""
    visible = [Path(path).expanduser().absolute() for path in (*readable, sys.prefix, "/usr/bin", "/usr/lib")]
    lacks = 'no file but what is "readable", and no network'
    for arg in args:
        path = Path(arg)
        if path.exists() and not (path.is_absolute() and any(path.is_relative_to(each) for each in visible)):
            lacks = f'no {arg}: write {path.absolute()}, and name it or its folder in "readable"'
            break
    return f'in the sandbox it finds {lacks}; or run it outside: "sandbox": false'
