"""Whether what the training did not start, and needs from its first step on, is there."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

from omegaconf import DictConfig

from verl_tool.agent_loop.verl.config import options_in
from verl_tool.errors import ConfigError

ANSWER_SECONDS = 10.0
"""For the answer of a running tool server, all tries counted: it may just be starting."""
_PAUSE_SECONDS = 1.0


def check_tool_server(config: DictConfig) -> None:
    """Raises ConfigError if the config names a running tool server, and nobody answers there.

    A server of another kind need not know the routes of ours: any answer counts.
    """
    options = options_in(config)
    replayed = config.actor_rollout_ref.replay is not None
    if config.tool_server.start is not None or not options.enable_agent or replayed:
        return
    if (why := _why_no_answer(str(options.tool_server_url))) is not None:
        raise ConfigError(
            f"no tool server answers at {options.tool_server_url} (actor_rollout_ref.agent.tool_server_url, of a "
            f"recipe TOOL_SERVER_URL): {why}. Start it (python -m verl_tool.servers.ray_serve), correct the address, "
            "or let the training start one (tool_server.start)"
        )


def _why_no_answer(url: str) -> str | None:
    deadline = time.monotonic() + ANSWER_SECONDS
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            opener.open(f"{url.rstrip('/')}/health", timeout=max(0.1, deadline - time.monotonic())).close()
        except urllib.error.HTTPError as error:
            error.close()
            return None
        except (OSError, ValueError) as error:
            if time.monotonic() + _PAUSE_SECONDS > deadline:
                return str(error)
            time.sleep(_PAUSE_SECONDS)
        else:
            return None
