"""Whether what the training did not start, and needs from its first step on, is there."""

from __future__ import annotations

import os

from omegaconf import DictConfig

from verl_tool.agent_loop.verl.config import options_in
from verl_tool.agent_loop.verl.told_tools import check_server
from verl_tool.errors import ConfigError, ToolFault

ANSWER_SECONDS = 10.0
"""For the answer of a running tool server, all tries counted."""


def check_tool_server(config: DictConfig) -> None:
    """Raises ConfigError if the config names a running tool server, and nobody answers there."""
    options = options_in(config)
    replayed = config.actor_rollout_ref.replay is not None
    if config.tool_server.start is not None or not options.enable_agent or replayed:
        return

    try:
        check_server(options, ANSWER_SECONDS, os.environ.get("VERL_TOOL_API_KEY"))
    except ToolFault as fault:
        raise ConfigError(
            f"no tool server answers at {options.tool_server_url} (actor_rollout_ref.agent.tool_server_url, of a "
            f"recipe TOOL_SERVER_URL): {fault.message}. Start it (python -m verl_tool.servers.ray_serve), correct the "
            "address, or let the training start one (tool_server.start)"
        ) from None
