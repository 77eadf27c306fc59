"""Stand-ins for servers of environments: they answer as recorded, over real HTTP and WebSockets on the loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web


@asynccontextmanager
async def serve_app(app: web.Application) -> AsyncIterator[str]:
    """Serve an application at a free port, and yield its address."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class ReplayedOpenEnv:
    """An OpenEnv server. A message has the recorded answer that follows the same message."""

    def __init__(self, recorded: Mapping[str, Any], *, max_sessions: int = 64, api_key: str | None = None) -> None:
        self.recorded, self.max_sessions, self.api_key = recorded, max_sessions, api_key
        self.open = 0
        self.received: list[list[Any]] = []
        """Messages of each connection."""
        self.sockets: list[web.WebSocketResponse] = []
        self.answers: dict[str, Any] = {}
        """In place of a recorded answer, by the value of a step's first field: a text to send, None to send nothing, or
        a code with which the connection is closed."""
        self.ping_seconds: float | None = None
        self.app = web.Application()
        for name in ("schema", "metadata"):
            self.app.router.add_get(f"/{name}", self._described)
        self.app.router.add_get("/ws", self._play)

    async def _described(self, request: web.Request) -> web.Response:
        self._check_key(request)
        return web.json_response(self.recorded[request.path.strip("/")])

    def _check_key(self, request: web.Request) -> None:
        if self.api_key is not None and request.headers.get("authorization") != f"Bearer {self.api_key}":
            raise web.HTTPUnauthorized

    async def _play(self, request: web.Request) -> web.WebSocketResponse:
        self._check_key(request)
        # `heartbeat` closes a connection whose pings are not answered, as uvicorn does.
        opened = web.WebSocketResponse(heartbeat=self.ping_seconds)
        await opened.prepare(request)
        if self.open >= self.max_sessions:
            words = f"Server at capacity: {self.open}/{self.max_sessions} sessions active."
            await opened.send_json({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": words}})
            await opened.close()
            return opened
        self.open += 1
        self.sockets.append(opened)
        received: list[Any] = []
        self.received.append(received)
        try:
            async for message in opened:
                if message.type is WSMsgType.TEXT:
                    received.append(json.loads(message.data))
                    await self._answer(opened, received[-1])
        finally:
            self.open -= 1
        return opened

    async def _answer(self, opened: web.WebSocketResponse, message: Mapping[str, Any]) -> None:
        first = next(iter(message["data"].values()), None)
        if message["type"] == "step" and str(first) in self.answers:
            answer = self.answers[str(first)]
            if isinstance(answer, int):
                await opened.close(code=answer)
            elif answer is not None:
                await opened.send_str(answer)
            return
        for exchange in self.recorded["exchanges"]:
            if exchange["send"] == message:
                await opened.send_json(exchange["recv"])
                return
        await opened.send_json({"type": "error", "data": {"code": "SESSION_ERROR", "message": "not recorded"}})


class ReplayedNemoGym:
    """A resources server. A request has the next recorded answer of its path and body; a recorded body None is any."""

    def __init__(self, paths: Sequence[str], exchanges: Sequence[Mapping[str, Any]]) -> None:
        self.exchanges, self.paths = exchanges, paths
        self.received: list[tuple[str, Any, str | None]] = []
        """Path, body and cookie of each request."""
        self.delay_seconds: dict[str, float] = {}
        self.app = web.Application()
        self.app.router.add_get("/{path:.*}", self._deny)
        self.app.router.add_post("/{path:.*}", self._answer)

    async def _deny(self, request: web.Request) -> web.Response:
        return web.Response(status=405 if request.path in self.paths else 404)

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        cookie = request.headers.get("cookie")
        number = sum(path == request.path for path, _, _ in self.received)
        self.received.append((request.path, body, cookie))
        await asyncio.sleep(self.delay_seconds.get(request.path, 0))
        fitting = [each for each in self.exchanges if each["path"] == request.path and each["body"] in (None, body)]
        if not fitting:
            return web.json_response({"detail": "not recorded"}, status=418)
        exchange = fitting[min(number, len(fitting) - 1)]
        response = web.json_response(exchange["answer"], status=exchange["status"])
        if cookie is None:
            response.set_cookie("Server___session", "eyJzZXNzaW9uX2lkIjogIjEifQ==.aSc.x_y-z")
        return response
