"""The tool server that runs a run's calls again: an existing one, or a new one with the run's tools."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from verl_tool.errors import ConfigError
from verl_tool.http.supervised_server import SupervisedServer, serve_command
from verl_tool.servers.serve.ports import free_ports

LOG = Path("outputs/replay/tool_server.log")


@contextlib.contextmanager
def tool_server(config: DictConfig | None, url: str | None) -> Iterator[str]:
    """Yield the URL of a tool server: `url`, or by default the server of the run's config, which is started if the run
    did. Raises ConfigError if neither names a server, ToolServerError if it does not start."""
    agent = config.actor_rollout_ref.agent if config is not None else {}
    if url is None and config is not None and config.tool_server.start is not None:
        (port,) = free_ports(1)
        level = config.tool_server.get("isolation")
        args = (*map(str, config.tool_server.args), *(() if level is None else ("--isolation", str(level))))
        command = serve_command(config.tool_server.start, port, args)
        timeout = float(config.tool_server.start_timeout)
        with SupervisedServer(command, f"http://127.0.0.1:{port}", LOG, start_timeout=timeout) as server:
            yield server.url
        return
    url = url or agent.get("tool_server_url") or (agent.get("tool_config") or {}).get("server_url")
    if url is None:
        raise ConfigError("the config of the run names no tool server; give --tool_server_url")
    yield str(url)


def served_tools(config: DictConfig | None) -> list[str]:
    """Return the names and paths of the tools that the run served itself."""
    served = config.tool_server.start if config is not None else None
    return [name.strip() for name in str(served or "").split(",") if name.strip()]
