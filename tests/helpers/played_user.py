"""An OpenAI-compatible endpoint whose model plays a user by a rule, for tests of simulated users."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web
from local_server import LocalServer

UserRule = Callable[[list[dict[str, str]]], "str | int | None"]
"""Maps a request's messages to the answer, an HTTP status, or None for a message without content."""
MAX_CHARACTERS = 2000
"""Of an answer; a longer one is cut off, and says so as an answer does at ``max_tokens``."""


class PlayedUser(LocalServer):
    """`requests` has the bodies of all requests, and `keys` their API keys."""

    def __init__(self, rule: UserRule) -> None:
        self.rule = rule
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/chat/completions", self._answer)]

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        text = self.rule(body["messages"])
        if isinstance(text, int):
            return web.Response(status=text, text="no", headers={"Retry-After": "0.01"})
        message = {"role": "assistant", "content": text and text[:MAX_CHARACTERS]}
        finish = "length" if text and len(text) > MAX_CHARACTERS else "stop"
        return web.Response(text=json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish}]}))
