"""What a server is told at its start, in the form in which it travels to every replica."""

from __future__ import annotations

import secrets

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from verl_tool.http.request_body import MAX_MEDIA_BODY_BYTES
from verl_tool.servers.mcp.catalog import McpServerTools
from verl_tool.servers.mcp.config import McpConfig
from verl_tool.servers.tool_config import ToolConfig

APP_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"


class AutoscalingSettings(BaseModel):
    """``--num_replicas auto``: how many replicas there are follows the length of the queue."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 8
    target_entries: PositiveFloat = 32.0
    """Entries (trajectories' calls) running or queued per replica that are aimed at."""
    upscale_delay_seconds: float = 5.0
    downscale_delay_seconds: float = 120.0
    look_back_seconds: PositiveFloat = 5.0


def new_server_name(app_name: str) -> str:
    """A name that no other server has, nor had."""
    return f"{app_name}-{secrets.token_hex(8)}"


class ReplicaSettings(BaseModel):
    """Everything that one replica needs to know."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    app_name: str = Field(default="verl_tool", pattern=APP_NAME_PATTERN)
    """Of the Serve application."""
    server: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """Name of the server from its start to its end (`new_server_name`). Requests that name another are refused. Empty:
    replicas that Ray Serve's own commands started agree on one (`serve.cluster_settings`)."""
    tool_type: str = ""
    """Comma-separated names and paths of tools; empty: those that the config enables."""
    tool_config: ToolConfig | None = None
    mcp: McpConfig | None = None
    """MCP servers whose tools are served too."""
    mcp_offers: tuple[McpServerTools, ...] = ()
    """What those servers offer (`find_offers`)."""
    workers_per_tool: PositiveInt | None = None
    isolation: str | None = None
    """Lowest level of isolation to accept; None: the sandbox's own default."""
    max_concurrent_requests: PositiveInt = 256
    """Entries that run at a time in one replica."""
    max_queued_requests: PositiveInt = 4096
    """Entries that wait in one replica before it answers 503."""
    request_timeout_seconds: PositiveFloat = 300.0
    state_ttl_seconds: PositiveFloat = 3600.0
    max_trajectories: PositiveInt = 100_000
    """Trajectories that one replica remembers."""
    max_body_bytes: PositiveInt = MAX_MEDIA_BODY_BYTES
    drain_seconds: PositiveFloat = 60.0
    """The longest that a replica which is taken away stays for the trajectories that it holds."""
    done_if_invalid: bool = False
    api_key: str | None = Field(default=None, repr=False)
    listen_host: str = "127.0.0.1"
    """Where clients reach the server: with this port, on each node that has a replica."""
    listen_port: PositiveInt | None = None
    """None: a request's ``Host`` may bear any port."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names by which clients may call (`HostCheck`)."""
    several_nodes: bool = False
    """Whether peers may sit on other machines, so that direct servers listen on the node's address."""
    log_level: str = "INFO"
