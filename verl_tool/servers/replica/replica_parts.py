"""Make the tools, the tool set and the application of one replica from its settings.

Used by each replica on Ray Serve, and by the one process of an embedded server.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_tool.http.host_check import HostCheck
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.mcp.tool import mcp_tools
from verl_tool.servers.replica.asgi_app import AppHandler, ToolServerApp
from verl_tool.servers.replica.mcp_endpoint import PATH, McpEndpoint
from verl_tool.servers.replica.router import Router
from verl_tool.servers.settings import ReplicaSettings
from verl_tool.servers.tools import load_tools
from verl_tool.servers.tools.base import Tool


def make_tools(settings: ReplicaSettings) -> list[Tool]:
    """Make the tools of ``--tool_type`` and those of MCP servers, without starting them.

    Raises ConfigError if a tool is unknown or an option is wrong.
    """
    options = {"workers": settings.workers_per_tool, "isolation": settings.isolation}
    shared = {name: value for name, value in options.items() if value is not None}
    if settings.mcp is None:
        return load_tools(settings.tool_type, settings.tool_config, shared)
    config = settings.tool_config
    has_local = settings.tool_type.strip() or (config is not None and any(entry.enabled for entry in config.tools))
    tools = load_tools(settings.tool_type, config, shared) if has_local else []
    return [*tools, *mcp_tools(settings.mcp, settings.mcp_offers, settings.isolation)]


def make_toolset(settings: ReplicaSettings) -> ToolSet:
    """Make the tools and the table of their trajectories, without starting them."""
    return ToolSet(
        make_tools(settings),
        state_ttl_seconds=settings.state_ttl_seconds,
        max_trajectories=settings.max_trajectories,
        call_timeout_seconds=settings.request_timeout_seconds,
        done_if_invalid=settings.done_if_invalid,
        max_calls=settings.tool_config.execution.max_tools_per_generation if settings.tool_config else None,
    )


def make_app(
    settings: ReplicaSettings,
    toolset: ToolSet,
    router: Router,
    peer_key: str | None = None,
    routes: Sequence[tuple[str, str, AppHandler]] = (),
) -> ToolServerApp:
    """Make the ASGI application over `toolset`. `peer_key` and `routes` serve requests of other replicas."""
    return ToolServerApp(
        toolset,
        max_concurrent_requests=settings.max_concurrent_requests,
        max_queued=settings.max_queued_requests,
        api_key=settings.api_key,
        max_body_bytes=settings.max_body_bytes,
        request_timeout_seconds=settings.request_timeout_seconds,
        router=router,
        peer_key=peer_key,
        host_check=HostCheck(
            settings.listen_host, settings.listen_port, settings.allowed_hosts, has_key=settings.api_key is not None
        ),
        server=settings.server,
        routes=[("POST", PATH, McpEndpoint().answer), *routes],
    )


def isolation_of(toolset: ToolSet) -> str:
    """Describe the isolation of the tools that run code, each once. Empty if no tool runs code."""
    return "; ".join(dict.fromkeys(filter(None, (tool.isolation_in_force() for tool in toolset.tools))))
