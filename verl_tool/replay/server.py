"""The tool server on which a run's calls are run again: one that is there, or one as the run's own."""

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
    """The URL of the server, for as long as the block runs: `url`, or else that of the run's config. Raises ConfigError
    if neither names one, ToolServerError if the run's does not start."""
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
        raise ConfigError("no tool server: the run names none; give --tool_server_url")
    yield str(url)


def served_tools(config: DictConfig | None) -> list[str]:
    """The names and paths of the tools that the run itself served."""
    served = config.tool_server.start if config is not None else None
    return [name.strip() for name in str(served or "").split(",") if name.strip()]
