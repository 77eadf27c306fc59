"""Whether what the training did not start, and needs from its first step on, is there."""

from __future__ import annotations

import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.errors import ConfigError

ANSWER_SECONDS = 10.0
"""For the answer of a server that runs already, all tries counted: it may just be starting."""
_PAUSE_SECONDS = 1.0


def check_tool_server(config: DictConfig, options: EpisodeOptions) -> None:
    """Raises ConfigError if the config names a running tool server, and nobody answers there.

    A server of another kind need not know the routes of ours: a connection that comes about is enough.
    """
    replayed = config.actor_rollout_ref.replay is not None
    if config.tool_server.start is not None or not options.enable_agent or replayed:
        return
    if (why := _why_no_answer(str(options.tool_server_url))) is not None:
        raise ConfigError(
            f"no tool server answers at {options.tool_server_url} (actor_rollout_ref.agent.tool_server_url, of a "
            f"recipe TOOL_SERVER_URL): {why}. Start it (python -m verl_tool.servers.ray_serve), correct the address, "
            "or let the training start one (tool_server.start)"
        )


def check_reward_servers(config: DictConfig) -> None:
    """Raises ConfigError for an address in the options of the reward manager (of a judge, of a server that runs code)
    at which nobody answers."""
    if config.actor_rollout_ref.replay is not None:
        return
    kwargs = config.reward.get("reward_kwargs")
    provided = OmegaConf.to_container(kwargs, resolve=True) if OmegaConf.is_config(kwargs) else kwargs
    fusion = OmegaConf.select(config, "reward.sandbox_fusion.url")
    named = [*_addresses("reward.reward_kwargs", provided), *_addresses("reward.sandbox_fusion.url", fusion)]
    problems = [
        f"{name}={url}: nobody answers there: {why}" for name, url in named if url and (why := _why_no_answer(url))
    ]
    if problems:
        raise ConfigError("\n       ".join([*problems, "start the judge or the server, or correct the address"]))


def _addresses(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Options whose names end in ``url``, by their whole names."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _addresses(f"{name}.{key}", each)
    elif isinstance(value, str) and name.endswith("url") and value.startswith(("http://", "https://")):
        yield name, value


def _why_no_answer(url: str) -> str | None:
    """None if the server takes connections: it may be of any kind, and busy. A proxy is taken to reach it."""
    try:
        address = urllib.parse.urlsplit(url)
        port = address.port or {"http": 80, "https": 443}[address.scheme]
        host = address.hostname or ""
    except (ValueError, KeyError) as error:
        return f"it is no address of a server ({error})"
    if address.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return None
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            socket.create_connection((host, port), max(0.1, deadline - time.monotonic())).close()
        except OSError as error:
            if time.monotonic() + _PAUSE_SECONDS > deadline:
                return str(error)
            time.sleep(_PAUSE_SECONDS)
        else:
            return None
