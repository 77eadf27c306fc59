"""An endpoint with scripted answers over real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from local_server import serve

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def stand_in(chat: Handler, models: Handler | None = None) -> AsyncIterator[str]:
    """Serve an endpoint whose ``/v1/chat/completions`` is `chat`, and yield its URL."""

    async def one_model(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "toy", "owned_by": "verl-tool"}]})

    async with serve(web.post("/v1/chat/completions", chat), web.get("/v1/models", models or one_model)) as url:
        yield f"{url}/v1"


async def begin(request: web.Request) -> web.StreamResponse:
    """Begin a stream of events."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


def event(delta: dict[str, object], **choice: object) -> bytes:
    """Format one event of a chat as `eval_service` sends it."""
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, **choice}]})}\n\n".encode()
