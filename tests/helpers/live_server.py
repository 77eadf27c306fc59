"""A real tool server in the process of the test: uvicorn on a free port of the loopback interface."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn

from verl_tool.http.http_protocol import BoundedHttp
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.replica.asgi_app import ToolServerApp
from verl_tool.servers.tools.base import Tool

START_SECONDS = 20.0


@dataclass
class LiveServer:
    """One server that answers at `url`."""

    url: str
    app: ToolServerApp
    server: uvicorn.Server
    task: asyncio.Task[None]

    @property
    def observations_url(self) -> str:
        return f"{self.url}/get_observation"

    async def stop(self) -> None:
        """Stop the server, then close the tools."""
        self.server.should_exit = True
        await asyncio.wait_for(self.task, START_SECONDS)
        await self.app.toolset.close(grace_seconds=0.5)


class LiveServers:
    """Starts servers and stops them all."""

    def __init__(self) -> None:
        self._running: list[LiveServer] = []

    async def start(self, tools: Sequence[Tool] | ToolSet, *, port: int = 0, **app_options: Any) -> LiveServer:
        """Start a server of `tools` at `port` (0: a free one). `app_options` are those of `ToolServerApp`."""
        toolset = tools if isinstance(tools, ToolSet) else ToolSet(tools)
        await toolset.start()
        app = ToolServerApp(toolset, **app_options)
        url, server, task = await serve_asgi(app, port)
        live = LiveServer(url, app, server, task)
        self._running.append(live)
        return live

    async def stop(self) -> None:
        while self._running:
            await self._running.pop().stop()


async def serve_asgi(
    app: Callable[..., Awaitable[None]], port: int = 0
) -> tuple[str, uvicorn.Server, asyncio.Task[None]]:
    """Serve any ASGI application at `port` (0: a free one)."""
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        http=BoundedHttp,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    deadline = asyncio.get_running_loop().time() + START_SECONDS
    while not server.started:
        if task.done() or asyncio.get_running_loop().time() > deadline:
            raise RuntimeError("the server did not start")
        await asyncio.sleep(0.01)
    return f"http://127.0.0.1:{listener.getsockname()[1]}", server, task
