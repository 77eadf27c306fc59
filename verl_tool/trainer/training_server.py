"""The tool server that a training starts for itself."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from verl_tool.http.supervised_server import SupervisedServer, serve_command


@contextlib.contextmanager
def tool_server(config: DictConfig, console: Console) -> Iterator[Callable[[], str | None]]:
    """The tool server that the config asks for, if any, for as long as the block runs.

    It starts meanwhile: it is up when the function that this gives returns its URL (None if the config asks for none),
    which raises ToolServerError if it fails.
    """
    from verl_tool.trainer.config_validation import args_of

    requested = config.tool_server
    if requested.start is None:
        yield lambda: None
        return
    agent, run = config.actor_rollout_ref.agent, Path(config.run_dir)
    url_file, log = run / "tool_server.url", run / "tool_server.log"
    # The same for whoever goes on with this run, so that what this start leaves behind is replaced.
    app_name = f"verl_tool-{hashlib.sha256(str(run).encode()).hexdigest()[:12]}"
    args = ["--url_file", str(url_file), *args_of(config)]
    command = serve_command(requested.start, requested.port, args, app_name=app_name)
    server = SupervisedServer(
        command,
        agent.tool_server_url,
        log,
        start_timeout=requested.start_timeout,
        max_restarts=requested.max_restarts,
        url_file=url_file,
    )

    def wait_until_up() -> str | None:
        server.wait_until_up()
        if server.url != agent.tool_server_url:
            agent.tool_server_url = server.url
        served = requested.start or "tools of MCP servers"
        console.print(f"tool server: {server.url} ({served}), log in {log.name}", soft_wrap=True, highlight=False)
        return server.url

    server.start()
    try:
        yield wait_until_up
    finally:
        server.stop()
