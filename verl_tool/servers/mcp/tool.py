"""A tool of an MCP server, as one of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_tool.errors import ConfigError
from verl_tool.formats import Call
from verl_tool.formats.json_call import decode
from verl_tool.servers.mcp.catalog import McpServerTools, require_sdk
from verl_tool.servers.mcp.config import McpConfig
from verl_tool.servers.mcp.result import to_result
from verl_tool.servers.tools.base import Context, InvalidCall, Tool, ToolResult

if TYPE_CHECKING:
    from verl_tool.servers.mcp.connection import Connection
    from verl_tool.servers.mcp.sessions import McpSessions

_EXAMPLES: Mapping[object, object] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
"""Values of arguments in an example, by their types."""


class McpTool(Tool):
    """One tool. Each has a class of its own, for a tool's name and schema belong to its class; see `mcp_tools`."""

    _offer: McpServerTools
    _sessions: McpSessions
    _max_length: int

    async def start(self) -> None:
        await self._sessions.start()

    async def close(self) -> None:
        await self._sessions.stop()

    def isolation_in_force(self) -> str:
        return self._sessions.isolation_in_force()

    @property
    def state_group(self) -> str:
        """A trajectory has one client for all tools of a server."""
        return f"mcp:{self._offer.server}"

    async def create_state(self, trajectory_id: str, extra: Mapping[str, Any]) -> Connection:
        return await self._sessions.new()

    async def close_state(self, state: Connection) -> None:
        await self._sessions.leave(state)

    async def run(self, call: Call, context: Context) -> ToolResult:
        from verl_tool.servers.mcp.connection import AnswerError

        arguments = call.arguments if call.arguments is not None else self._read(call.input)
        try:
            answer = await self._sessions.call(context.state, self._offer.tool, arguments)
        except AnswerError as error:
            return ToolResult(f"Error: {error}"[: self._max_length], error=True)
        return await asyncio.to_thread(to_result, self.name, answer, self._max_length)

    def _read(self, text: str) -> Mapping[str, Any]:
        """The arguments in a text: a JSON object, or the value of the only one that there is."""
        try:
            value = decode(text) if text.strip() else {}
        except ValueError:
            value = None
        if isinstance(value, dict):
            return value
        names = list(self.parameters.get("properties", {}))
        if len(names) == 1:
            return {names[0]: text}
        raise InvalidCall(f"write the arguments of {self.name} as one JSON object with the names {', '.join(names)}")


def mcp_tools(config: McpConfig, offers: Sequence[McpServerTools], isolation: str | None = None) -> list[McpTool]:
    """The tools that `offers` lists, not started; those of one server share its clients.

    Raises ConfigError if a server is not in `config`, or the SDK is not installed.
    """
    require_sdk()
    from verl_tool.servers.mcp.sessions import McpSessions

    servers = config.enabled()
    sessions: dict[str, McpSessions] = {}
    tools = []
    for offer in offers:
        if offer.server not in servers:
            raise ConfigError(f"tool {offer.name} is of MCP server {offer.server!r}, which the config does not enable")
        if offer.server not in sessions:
            sessions[offer.server] = McpSessions(offer.server, servers[offer.server], isolation)
        tools.append(_tool(offer, sessions[offer.server], config))
    return tools


def _tool(offer: McpServerTools, sessions: McpSessions, config: McpConfig) -> McpTool:
    server = config.mcpServers[offer.server]
    body = {
        "name": offer.name,
        "description": offer.description,
        "parameters": offer.parameters,
        "example_actions": (_example(offer),),
        "stateful": server.stateful,
        "_offer": offer,
        "_sessions": sessions,
        "_max_length": server.max_output_length,
    }
    kind: type[McpTool] = type(offer.name, (McpTool,), body)
    return kind()


def _example(offer: McpServerTools) -> str:
    properties = offer.parameters.get("properties", {})
    requested = [name for name in offer.parameters.get("required", []) if isinstance(name, str)][:8]
    arguments = {name: _value(properties.get(name)) for name in requested}
    text = json.dumps({"name": offer.name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def _value(schema: object) -> object:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return _EXAMPLES.get(kind, "…") if isinstance(kind, str) else "…"
