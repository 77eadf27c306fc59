"""The tools of one replica, made from what the server was told."""

from __future__ import annotations

from verl_tool.servers.settings import ReplicaSettings
from verl_tool.servers.tools import load_tools
from verl_tool.servers.tools.base import Tool


def make_tools(settings: ReplicaSettings) -> list[Tool]:
    """The tools of ``--tool_type``, not started. Raises ConfigError if one is unknown or an option is wrong."""
    given = {"workers": settings.workers_per_tool, "isolation": settings.isolation}
    shared = {name: value for name, value in given.items() if value is not None}
    return load_tools(settings.tool_type, settings.tool_config, shared)
