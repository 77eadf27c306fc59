"""The MCP server `toy_mcp_server` as tools of a tool server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import toy_mcp_server

from verl_tool.errors import VerlToolError
from verl_tool.servers.mcp.catalog import McpServerTools, ask_all
from verl_tool.servers.mcp.config import McpConfig
from verl_tool.servers.mcp.tool import McpTool, mcp_tools

TOY = str(Path(toy_mcp_server.__file__))


def entry(mode: str = "", **settings: Any) -> dict[str, Any]:
    """Make a config entry, outside the sandbox by default because that starts faster."""
    args = ["-I", TOY, *([mode] if mode else [])]
    return {"command": "python", "args": args, "sandbox": False, "timeout_seconds": 10, **settings}


def toy(mode: str = "", **settings: Any) -> McpConfig:
    """Make a config of one server, named toy."""
    return McpConfig.parse({"mcpServers": {"toy": entry(mode, **settings)}})


async def offers_of(config: McpConfig) -> tuple[McpServerTools, ...]:
    """Return the catalog of its servers. Raises VerlToolError."""
    offers: list[McpServerTools] = []
    for found in (await ask_all(config)).values():
        if isinstance(found, VerlToolError):
            raise found
        offers += found
    return tuple(offers)


async def tools_of(config: McpConfig) -> list[McpTool]:
    """Return its servers' tools, not started."""
    return mcp_tools(config, await offers_of(config))


def programs(of: psutil.Process | None = None) -> list[psutil.Process]:
    """Return toy servers among the descendants of a process (None: this one)."""
    return [each for each in (of or psutil.Process()).children(recursive=True) if _is_toy(each)]


def _is_toy(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("python") and TOY in process.cmdline()
    except psutil.NoSuchProcess:  # programs come and go while one looks
        return False
