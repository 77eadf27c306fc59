"""Whether what the training did not start, and needs from its first step on, is there."""

from __future__ import annotations

import asyncio
import os

from omegaconf import DictConfig

from verl_tool.agent_loop.verl.config import options_in
from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import FaultKind

ANSWER_SECONDS = 10.0
"""For the answer of a running tool server, all tries counted."""
_NO_ANSWER = (FaultKind.UNREACHABLE, FaultKind.TIMEOUT)


def check_tool_server(config: DictConfig) -> None:
    """Raises ConfigError if the config names a running tool server, and nobody answers there.

    A server of another kind need not know the routes of ours: any answer counts.
    """
    options = options_in(config)
    replayed = config.actor_rollout_ref.replay is not None
    if config.tool_server.start is not None or not options.enable_agent or replayed:
        return

    async def ask() -> None:
        settings = {**options.client_settings(), "timeout": ANSWER_SECONDS}
        key = os.environ.get("VERL_TOOL_API_KEY")
        async with ToolClient(str(options.tool_server_url), api_key=key, **settings) as client:  # type: ignore[arg-type]
            await client.health()

    try:
        asyncio.run(ask())
    except ToolFault as fault:
        if fault.kind not in _NO_ANSWER:
            return
        raise ConfigError(
            f"no tool server answers at {options.tool_server_url} (actor_rollout_ref.agent.tool_server_url, of a recipe "
            f"TOOL_SERVER_URL): {fault.message}. Start it (python -m verl_tool.servers.ray_serve), correct the address, "
            "or let the training start one (tool_server.start)"
        ) from None
