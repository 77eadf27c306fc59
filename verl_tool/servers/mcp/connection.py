"""One client of one MCP server, from its connection to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from mcp import Client, MCPError
from mcp_types import (
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    InputRequiredResult,
    PaginatedRequestParams,
    Tool,
)
from pydantic import TypeAdapter, ValidationError

from verl_tool.errors import ConfigError, SandboxError, ToolFault, VerlToolError
from verl_tool.protocol import FaultKind
from verl_tool.servers.mcp.bounds import MAX_PAGES, MAX_TOOLS, Budget
from verl_tool.util.deadline import Deadline

# These log what a server sends that they do not understand, with a traceback each, and every HTTP request.
for _name in ("mcp.client", "mcp.shared", "httpx2"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)

_ANSWER: TypeAdapter[CallToolResult | InputRequiredResult] = TypeAdapter(CallToolResult | InputRequiredResult)
_US = Implementation(name="verl-tool", version="0.1")
_END_SECONDS = 10.0
_TRANSPORT_FAILED = ("Connection closed", "SSE stream ", "Server returned an error response", "Not Found")
"""How messages of the SDK begin that it makes itself in place of an answer of the server."""
_SESSION_CLOSED = "Session terminated"


class Unreachable(VerlToolError):
    """A server cannot be reached, or does not do as the protocol says."""


class AnswerError(VerlToolError):
    """The server answers a call with an error of the protocol: the model reads it."""


class Link(Protocol):
    """What a client talks through (`StdioLink`, `HttpLink`)."""

    ended: bool

    def open(self) -> Any:
        """A transport of the SDK."""
        ...

    def last_words(self) -> str:
        """Why it ended; may be empty."""
        ...


class Connection:
    """A client in a task of its own, for the SDK's contexts must be entered and left in one. Calls come from any task.

    `name`: of the server, for messages. `budget`: that of `link`.
    """

    def __init__(self, name: str, link: Link, budget: Budget, *, start_seconds: float, timeout_seconds: float) -> None:
        self._name, self._link, self._budget = name, link, budget
        self._start_seconds, self._timeout = start_seconds, timeout_seconds
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._failure: BaseException | None = None
        self._broken = False
        self.running = 0
        """Calls that wait for an answer."""

    @property
    def usable(self) -> bool:
        """Whether calls may be sent."""
        return self._client is not None and not (self._broken or self._link.ended or self._closing.is_set())

    async def open(self) -> None:
        """Connect. Raises Unreachable, or ConfigError if its program is not there."""
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._live(ready))
        waiting = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait({self._task, waiting}, timeout=self._start_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            if self._client is None:
                await self.close()
        if self._client is None:
            raise self._why_not()

    async def list_tools(self) -> list[Tool]:
        """What it offers. Raises Unreachable."""
        tools: list[Tool] = []
        cursor: str | None = None
        try:
            with Deadline(self._start_seconds):
                for _ in range(MAX_PAGES):
                    self._budget.renew()
                    assert self._client is not None
                    page = await self._client.session.list_tools(params=PaginatedRequestParams(cursor=cursor))
                    tools += page.tools
                    cursor = page.next_cursor
                    if len(tools) > MAX_TOOLS:
                        raise Unreachable(
                            f"MCP server {self._name} lists more than {MAX_TOOLS} tools; name some (tools)"
                        )
                    if cursor is None:
                        return tools
        except asyncio.TimeoutError:
            raise Unreachable(
                f"MCP server {self._name} did not list its tools within start_seconds={self._start_seconds:g}"
            ) from None
        except (MCPError, ValidationError, RecursionError) as error:
            raise Unreachable(f"MCP server {self._name} does not list its tools: {self._describe(error)}") from error
        raise Unreachable(f"MCP server {self._name} lists its tools on more than {MAX_PAGES} pages")

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """The server's answer.

        Raises AnswerError for an answer that is an error of the protocol, and ToolFault: ``timeout``; ``tool_crashed``
        if the server went down with the call, for the call may have brought that about.
        """
        assert self._client is not None
        self._budget.renew()
        params = CallToolRequestParams(name=tool, arguments=dict(arguments))
        self.running += 1
        try:
            with Deadline(self._timeout):
                # Not `call_tool`, which checks the answer against the schema of a server that may be hostile.
                answer = await self._client.session.send_request(CallToolRequest(params=params), _ANSWER)
        except asyncio.TimeoutError:
            self._broken = True
            words = (
                f"MCP server {self._name}: no answer to a call of {tool} within timeout_seconds={self._timeout:g}; if "
                "its calls may take longer, raise that in the MCP config"
            )
            raise ToolFault(FaultKind.TIMEOUT, words, retryable=False) from None
        except MCPError as error:
            raise self._judged(tool, error) from error
        except (ValidationError, RecursionError, RuntimeError, ValueError) as error:
            raise self._crashed(tool, f"its answer is none of the protocol: {str(error)[:500]}") from error
        finally:
            self.running -= 1
        if isinstance(answer, InputRequiredResult):
            raise AnswerError(f"{tool} asks a person for more input, and there is nobody to give it")
        return answer

    async def close(self) -> None:
        """Leave the server, within a few seconds."""
        self._closing.set()
        task = self._task
        if task is None:
            return
        if self._client is None:
            task.cancel()
        done, _ = await asyncio.wait({task}, timeout=_END_SECONDS)
        if not done:
            task.cancel()
            await asyncio.wait({task}, timeout=_END_SECONDS)

    async def _live(self, ready: asyncio.Event) -> None:
        try:
            async with Client(self._link.open(), cache=None, client_info=_US) as client:
                self._client = client
                ready.set()
                await self._closing.wait()
        except asyncio.CancelledError:
            if not self._closing.is_set():
                self._failure = ConnectionError("it was cancelled")
        except BaseException as error:  # the SDK's task groups raise groups of anything
            self._failure = error
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
        finally:
            self._broken = True

    def _why_not(self) -> VerlToolError:
        """Why there is no connection."""
        cause = _first(self._failure)
        if isinstance(cause, ConfigError):
            return ConfigError(f"MCP server {self._name}: {cause}")
        reported = self._link.last_words()
        if cause is None:
            words = f"no answer within start_seconds={self._start_seconds:g}; if it may take longer, raise that"
        else:
            words = str(cause) if isinstance(cause, (SandboxError, MCPError)) else f"{type(cause).__name__}: {cause}"
        if reported not in words:
            words += f" ({reported})"
        return Unreachable(f"MCP server {self._name} cannot be reached: {words}")

    def _judged(self, tool: str, error: MCPError) -> VerlToolError:
        """What an error is: one that the model reads, or a fault."""
        if error.message == _SESSION_CLOSED:
            self._broken = True
            words = f"MCP server {self._name} has forgotten the session; start the trajectory again as a new one"
            return ToolFault(FaultKind.STATE_LOST, words, retryable=False)
        if self._broken or self._link.ended or error.message.startswith(_TRANSPORT_FAILED):
            return self._crashed(tool, self._describe(error))
        return AnswerError(error.message)

    def _crashed(self, tool: str, why: str) -> ToolFault:
        self._broken = True
        words = f"MCP server {self._name} failed in a call of {tool}: {why}"
        return ToolFault(FaultKind.TOOL_CRASHED, words, retryable=False)

    def _describe(self, error: BaseException) -> str:
        reported = self._link.last_words()
        return f"{str(error)[:500]}{f' ({reported})' if reported else ''}"


def _first(error: BaseException | None) -> BaseException | None:
    """The first error in a group of groups."""
    while isinstance(getattr(error, "exceptions", None), tuple):
        assert error is not None
        error = error.exceptions[0]  # type: ignore[attr-defined]
    return error
