"""An OpenAI-compatible endpoint whose model follows a rule, for tests of judged rewards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Rule = Callable[[str, list[str], str], str | int]
"""Maps question, references and candidate to the reply, or to an HTTP status."""


def honest(question: str, references: list[str], candidate: str) -> str:
    """Compare by letter, except for case and a leading "the"."""
    plain = {text.lower().removeprefix("the ").strip() for text in references}
    return "correct" if candidate.lower().removeprefix("the ").strip() in plain else "incorrect"


class JudgeServer:
    """`asked` has the bodies of all requests, and `keys` the API keys of their headers."""

    def __init__(self, rule: Rule = honest) -> None:
        self.rule = rule
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._server = TestServer(app)

    async def start(self) -> str:
        """Start the endpoint and return its base URL."""
        await self._server.start_server()
        return str(self._server.make_url("/v1"))

    async def stop(self) -> None:
        await self._server.close()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        told = self.rule(*parts(body))
        if isinstance(told, int):
            return web.Response(status=told, text="no")
        return web.Response(text=json.dumps({"choices": [{"message": {"role": "assistant", "content": told}}]}))


def parts(body: dict[str, Any]) -> tuple[str, list[str], str]:
    """Return what an obedient model sees. Raises AssertionError if the prompt can be read in another way."""
    system, user = (message["content"] for message in body["messages"])
    opening, closing = re.findall(r"</?candidate-[0-9a-f]{16}>", system)
    assert (user.count(opening), user.count(closing)) == (1, 1)
    before, _, rest = user.partition(opening)
    candidate, _, after = rest.partition(closing)
    assert after == "\nVerdict:"
    assert "\n" not in candidate
    lines = before.splitlines()
    assert all(line.startswith(("Question: ", "Reference answer: ")) for line in lines)
    question = "".join(line.removeprefix("Question: ") for line in lines if line.startswith("Question: "))
    references = [line.removeprefix("Reference answer: ") for line in lines if line.startswith("Reference")]
    return question, references, candidate
