"""What the tool server told of its tools when a run began. It is kept in the run's config (``tool_server.tools``), so
that all processes, and whoever serves or continues the run, render the same prompts and find the same calls."""

from __future__ import annotations

import asyncio

from omegaconf import DictConfig
from pydantic import TypeAdapter, ValidationError

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError
from verl_tool.protocol import ToolDescription

_LIST = TypeAdapter(list[ToolDescription])


def ask_for_tools(options: EpisodeOptions, api_key: str | None = None) -> list[ToolDescription]:
    """What ``GET /tools`` of the server at `tool_server_url` tells. Raises ToolFault if there is no answer."""

    async def ask() -> list[ToolDescription]:
        async with ToolClient(str(options.tool_server_url), api_key=api_key, **options.client_settings()) as client:  # type: ignore[arg-type]
            return await client.tools()

    return asyncio.run(ask())


def as_setting(tools: list[ToolDescription]) -> str:
    """The tools as the value of a setting: JSON without ``$``, by which OmegaConf would refer to other settings."""
    return _LIST.dump_json(tools).decode().replace("$", "\\u0024")


def tools_in(config: DictConfig) -> tuple[ToolDescription, ...]:
    """The tools in a run's config; none if it asked for none, was told none, or is of before. Raises ConfigError if
    unreadable."""
    written = config.get("tool_server", {}).get("tools")
    if written is None:
        return ()
    try:
        return tuple(_LIST.validate_json(written))
    except ValidationError as error:
        raise ConfigError(f"tool_server.tools is no JSON list of tools, as a training writes it: {error}") from error


def serves_mcp(config: DictConfig) -> bool:
    """Whether the server that the run starts has tools of MCP servers, of which only that server can tell."""
    server = config.get("tool_server", {})
    return server.get("start") is not None and any(str(arg).startswith("--mcp") for arg in server.get("args") or ())
