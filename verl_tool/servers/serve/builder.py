"""The tool server for Ray Serve's own commands: ``serve run``, ``serve build``, ``serve deploy`` and KubeRay.

serve run verl_tool.servers.serve.builder:tool_server tool_type=calculator num_replicas=2
serve run examples/serve/tool_server.yaml
"""

# Without `from __future__ import annotations`: Serve looks at the type of the builder's argument, not at its name.

import os
from pathlib import Path

from pydantic import NonNegativeFloat, PositiveInt, field_validator
from ray.serve import Application

from verl_tool.servers.mcp.catalog import find_offers
from verl_tool.servers.mcp.config import McpConfig
from verl_tool.servers.replica.replica_parts import make_tools
from verl_tool.servers.serve.deployment import application
from verl_tool.servers.settings import AutoscalingSettings, ReplicaSettings


class ToolServerArgs(ReplicaSettings):
    """What may stand below ``args`` in a Serve config file, or behind ``serve run``: the settings of the server."""

    num_replicas: PositiveInt | AutoscalingSettings = 1
    """A number, or the bounds between which it follows the queue."""
    cpus_per_replica: NonNegativeFloat = 1.0
    listen_port: PositiveInt = 5000
    mcp: McpConfig | None = None
    """The content of the file that ``--mcp`` takes, or its path on the machine where the application is built."""
    several_nodes: bool = True
    """Whether replicas may sit on several nodes. False on one machine: then clients may go to the replicas directly."""

    @field_validator("mcp", mode="before")
    @classmethod
    def _read_mcp(cls, value: object) -> object:
        if value is None or isinstance(value, McpConfig):
            return value
        return McpConfig.from_file(Path(value)) if isinstance(value, str) else McpConfig.parse(value)


def tool_server(args: ToolServerArgs) -> Application:
    """The Serve application. ``VERL_TOOL_API_KEY`` of the environment is its API key if `args` has none.

    Raises ConfigError if a tool is unknown or an option of it is wrong, StartError if an MCP server cannot be reached.
    """
    key = args.api_key or os.environ.get("VERL_TOOL_API_KEY") or None
    offers = () if args.mcp is None else find_offers(args.mcp, args.isolation)
    settings = args.model_copy(update={"api_key": key, "mcp_offers": offers})
    make_tools(settings)
    return application(settings, args.num_replicas, cpus_per_replica=args.cpus_per_replica)
