"""What MCP servers offer: asked once when the tool server starts, so that all its replicas serve the same tools."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from verl_tool.errors import ConfigError, StartError, VerlToolError
from verl_tool.servers.mcp.bounds import MAX_DESCRIPTION, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, MAX_TOOL_NAME
from verl_tool.servers.mcp.config import McpConfig, McpServer
from verl_tool.util.json_text import excerpt

if TYPE_CHECKING:
    from mcp_types import Tool

_MIRRORED = '"x-mcp-header":'
_ODD = re.compile(r"[^A-Za-z0-9_-]")


class McpServerTools(BaseModel):
    """One tool of one server, as it is offered to the model."""

    model_config = ConfigDict(frozen=True)

    server: str
    tool: str
    """As its server calls it."""
    name: str
    """``mcp__server__tool``, each odd character an underscore."""
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments. Its server checks them, not we."""


def require_sdk(option: str = "--mcp") -> None:
    """Raises ConfigError if the SDK is not installed, which `option` needs."""
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        words = f"{option} needs the extra mcp ({error}); install it: pip install 'verl-tool[mcp]'"
        raise ConfigError(words) from None


def find_offers(config: McpConfig, isolation: str | None = None) -> tuple[McpServerTools, ...]:
    """The tools of all enabled servers. `isolation`: as ``--isolation``.

    Raises ConfigError, or StartError if a server cannot be reached.
    """
    offers: list[McpServerTools] = []
    for found in asyncio.run(ask_all(config, isolation)).values():
        if isinstance(found, ConfigError):
            raise found
        if isinstance(found, VerlToolError):
            raise StartError(f"{found}; --mcp_check tells of all servers")
        offers += found
    if not offers:
        raise ConfigError("the MCP config enables no server that offers a tool")
    return tuple(offers)


async def ask_all(config: McpConfig, isolation: str | None = None) -> dict[str, list[McpServerTools] | VerlToolError]:
    """What each enabled server offers, or why that is not known; all are asked at once."""
    require_sdk()
    servers = config.enabled()
    answers = await asyncio.gather(*(_ask(name, server, isolation) for name, server in servers.items()))
    return dict(zip(servers, answers, strict=True))


async def _ask(name: str, server: McpServer, isolation: str | None) -> list[McpServerTools] | VerlToolError:
    from verl_tool.servers.mcp.sessions import McpSessions

    sessions = McpSessions(name, server, isolation)
    try:
        return offers_of(name, server, await sessions.listed())
    except VerlToolError as error:
        return error
    finally:
        await sessions.close()


def offers_of(name: str, server: McpServer, listed: Sequence[Tool]) -> list[McpServerTools]:
    """The tools that server `name` lists, as they are offered. Raises ConfigError that names the tool at fault."""
    known = [tool.name for tool in listed]
    missing = sorted(set(server.tools or ()) - set(known))
    if missing:
        raise ConfigError(f"MCP server {name} has no tool {missing[0]!r}; it has: {', '.join(known)[:2000]}")
    offers: dict[str, McpServerTools] = {}
    for tool in listed:
        if server.tools is not None and tool.name not in server.tools:
            continue
        offer = _offer(name, tool)
        if server.url is not None and _MIRRORED in json.dumps(offer.parameters):
            raise ConfigError(
                f"MCP server {name}: its tool {excerpt(tool.name)} wants arguments in HTTP headers (x-mcp-header), "
                "which is not supported; name others (tools)"
            )
        if offer.name in offers:
            both = f"{excerpt(offers[offer.name].tool)} and {excerpt(tool.name)}"
            raise ConfigError(f"MCP server {name}: its tools {both} would both be {offer.name}; name some (tools)")
        offers[offer.name] = offer
    return list(offers.values())


def _offer(server: str, tool: Tool) -> McpServerTools:
    name = f"mcp__{server}__{_ODD.sub('_', tool.name)}"
    if not tool.name or len(name) > MAX_TOOL_NAME:
        raise ConfigError(
            f"MCP server {server}: the name of its tool {excerpt(tool.name)} has {len(tool.name)} characters; with "
            f"that of the server 1 to {MAX_TOOL_NAME} are taken; name others (tools)"
        )
    description = "".join(
        each for each in tool.description or tool.title or tool.name if each.isprintable() or each == "\n"
    )
    return McpServerTools(
        server=server,
        tool=tool.name,
        name=name,
        description=description.strip()[:MAX_DESCRIPTION] or tool.name,
        parameters=_schema(server, tool),
    )


def _schema(server: str, tool: Tool) -> dict[str, Any]:
    schema = {"type": "object", **tool.input_schema}
    problem = None
    if schema["type"] != "object" or not isinstance(schema.get("properties", {}), Mapping):
        problem = "is not that of an object"
    elif _is_deeper(schema, MAX_SCHEMA_DEPTH):
        problem = f"is nested more than {MAX_SCHEMA_DEPTH} levels deep"
    elif len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
        problem = f"has more than {MAX_SCHEMA_BYTES} bytes"
    if problem:
        raise ConfigError(
            f"MCP server {server}: the schema of its tool {excerpt(tool.name)} {problem}; name others (tools)"
        )
    return schema


def _is_deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(each, levels - 1) for each in inner)
