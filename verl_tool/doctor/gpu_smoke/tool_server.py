"""The tool server of the parts: the project's own, in a process without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_tool.servers.serve.ports import free_ports
from verl_tool.servers.supervised_server import SupervisedServer, serve_command

TOOL = Path(__file__).with_name("count_tool.py")


@contextmanager
def running_tool_server(folder: Path) -> Iterator[str]:
    """The base URL of a server of `count`, for as long as the block runs."""
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    log = folder / "logs" / "tool_server.log"
    with SupervisedServer(serve_command(str(TOOL), port, ["--embedded"]), url, log, max_restarts=0):
        yield url
