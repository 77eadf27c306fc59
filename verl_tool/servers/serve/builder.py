"""The tool server for Ray Serve's own commands: ``serve run``, ``serve build``, ``serve deploy`` and KubeRay.

serve run verl_tool.servers.serve.builder:tool_server tool_type=calculator num_replicas=2
serve run examples/serve/tool_server.yaml
"""

# Without `from __future__ import annotations`: Serve looks at the type of the builder's argument, not at its name.

import os

from pydantic import NonNegativeFloat, PositiveInt
from ray.serve import Application

from verl_tool.servers.replica_parts import make_tools
from verl_tool.servers.serve.deployment import application
from verl_tool.servers.settings import AutoscalingSettings, ReplicaSettings


class ToolServerArgs(ReplicaSettings):
    """What may stand below ``args`` in a Serve config file, or behind ``serve run``: the settings of the server."""

    num_replicas: PositiveInt | AutoscalingSettings = 1
    """A number, or the bounds between which it follows the queue."""
    cpus_per_replica: NonNegativeFloat = 1.0
    several_nodes: bool = True
    """Whether replicas may sit on several nodes. False on one machine: then clients may go to the replicas directly."""


def tool_server(args: ToolServerArgs) -> Application:
    """The Serve application. ``VERL_TOOL_API_KEY`` of the environment is its API key if `args` has none.

    Raises ConfigError if a tool is unknown or an option of it is wrong.
    """
    key = args.api_key or os.environ.get("VERL_TOOL_API_KEY") or None
    settings = args.model_copy(update={"api_key": key})
    make_tools(settings)
    return application(settings, args.num_replicas, cpus_per_replica=args.cpus_per_replica)
