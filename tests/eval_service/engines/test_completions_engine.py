"""The engine over HTTP, against a real server that answers by a script. Against vLLM's own: `test_live.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from eval_service.engines import completions_engine
from eval_service.engines.base import EngineError, RequestRejectedError, TokenChunk, TokenLogProb
from eval_service.engines.completions_engine import CompletionsEngine
from eval_service.settings import CompletionsSettings
from verl_tool.client.exchange import KEEP_ALIVE_SECONDS
from verl_tool.errors import ConfigError

CARD = {"id": "m", "max_model_len": 64}


def choice(token_ids: list[int] | None, finish: str | None, **further: Any) -> dict[str, Any]:
    return {"choices": [{"text": "x", "token_ids": token_ids, "finish_reason": finish, **further}]}


class Server:
    """Lists `cards`; answers every completion with `status` and `answer`, or with `lines` of a stream."""

    def __init__(self) -> None:
        self.cards: list[dict[str, Any]] = [CARD]
        self.answer: object = choice([7, 8], "stop")
        self.status = 200
        self.lines: list[str] = []
        self.asked, self.goes_on = asyncio.Event(), asyncio.Event()
        self.goes_on.set()
        self.bodies: list[dict[str, Any]] = []
        self.ports: list[int] = []
        self._runner: web.AppRunner | None = None

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": self.cards})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.ports.append(request.transport.get_extra_info("peername")[1])
        self.bodies.append(await request.json())
        self.asked.set()
        await self.goes_on.wait()
        if not self.lines:
            return web.json_response(self.answer, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        for line in self.lines:
            await response.write(line.encode() + b"\n\n")
        return response

    @asynccontextmanager
    async def running(self, **settings: Any) -> AsyncIterator[CompletionsEngine]:
        """The server, and an engine that is connected to it."""
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        runner = self._runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            engine = await CompletionsEngine.connect(CompletionsSettings(url=url, **settings), 100)
            try:
                yield engine
            finally:
                await engine.close()
        finally:
            await self.stop()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


@pytest.fixture
def server() -> Server:
    return Server()


async def heard(engine: CompletionsEngine, params: dict[str, Any]) -> tuple[Any, list[TokenChunk]]:
    """A turn, and its chunks as they came."""
    chunks: list[TokenChunk] = []

    async def listen(chunk: TokenChunk) -> None:
        chunks.append(chunk)

    return await engine.generate([1], params, "r", listen), chunks


async def test_an_answer_in_one_piece(server: Server) -> None:
    async with server.running() as engine:
        turn = await engine.generate([1, 2, 3], {"max_tokens": 5, "stop": ["</a>"], "seed": None}, "r")
        assert engine.max_model_len == 64
    assert turn.token_ids == [7, 8]
    assert (turn.log_probs, turn.stop_reason) == (None, "stop")
    (body,) = server.bodies
    assert body["prompt"] == [1, 2, 3]
    assert (body["model"], body["max_tokens"], body["stop"]) == ("m", 5, ["</a>"])
    assert body["return_token_ids"]
    assert not body["stream"]
    assert "seed" not in body


async def test_a_stream(server: Server) -> None:
    told = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -0.1}]}
    events = [choice([7], None, logprobs=told), choice([8], "length", logprobs={"token_logprobs": [-2.0]})]
    events.append({"choices": [], "usage": {}})
    lines = [f"data: {json.dumps(event)}" for event in events]
    server.lines = [": ping", "event: message", lines[0], lines[1], lines[2], "data: [DONE]"]
    async with server.running() as engine:
        turn, chunks = await heard(engine, {"max_tokens": 2, "logprobs": 2})
    assert (turn.token_ids, turn.log_probs, turn.stop_reason) == ([7, 8], [-0.5, -2.0], "length")
    assert [list(chunk.token_ids) for chunk in chunks] == [[7], [8]]
    assert chunks[0].log_probs == [TokenLogProb(7, -0.5, ((9, -0.1), (7, -0.5)))]
    assert chunks[1].log_probs == [TokenLogProb(8, -2.0)]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([f"data: {json.dumps(choice([7], None))}"], "broke off before"),
        (['data: {"error": {"message": "out of memory"}}'], "out of memory"),
        (["data: {nonsense"], "no JSON"),
        (["data: 17"], "'17' where an answer was expected"),
        ([f"data: {json.dumps(choice(None, 'stop'))}"], "sends no token_ids"),
    ],
)
async def test_a_stream_that_cannot_be_used(server: Server, lines: list[str], words: str) -> None:
    server.lines = lines
    async with server.running() as engine:
        with pytest.raises(EngineError, match=words):
            await heard(engine, {"max_tokens": 2})


async def test_log_probabilities_must_be_one_a_token(server: Server) -> None:
    server.answer = choice([7, 8], "stop", logprobs={"token_logprobs": [-1.0]})
    async with server.running() as engine:
        with pytest.raises(EngineError, match="2 tokens and 1 log-prob"):
            await engine.generate([1], {"max_tokens": 2, "logprobs": 0}, "r")


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, RequestRejectedError), (422, RequestRejectedError), (429, EngineError), (500, EngineError)],
)
async def test_a_refusal_is_told_from_a_failure(server: Server, status: int, error: type[Exception]) -> None:
    server.status, server.answer = status, {"error": "why it is so"}
    async with server.running() as engine:
        with pytest.raises(error, match=f"HTTP {status}: .*why it is so"):
            await engine.generate([1], {"max_tokens": 2}, "r")


async def test_an_idle_connection_is_dropped_before_the_server_drops_it(server: Server) -> None:
    """uvicorn closes it after 5 s; a request sent just then would be lost, and with it the conversation."""
    async with server.running() as engine:
        for pause in (0.0, 0.0, KEEP_ALIVE_SECONDS + 0.2):
            await asyncio.sleep(pause)
            await engine.generate([1], {"max_tokens": 2}, "r")
    first, soon, late = server.ports
    assert first == soon != late


async def test_no_server() -> None:
    with pytest.raises(EngineError, match="gives no answer"):
        await CompletionsEngine.connect(CompletionsSettings(url="http://127.0.0.1:9"), 100)
    with pytest.raises(ConfigError, match="begin it with http://"):
        await CompletionsEngine.connect(CompletionsSettings(url="127.0.0.1:9"), 100)


@pytest.mark.parametrize(
    ("cards", "words"),
    [
        ([CARD, CARD | {"id": "n"}], r"serves \['m', 'n'\]; say which"),
        ([], r"serves \[\]"),
        ([{"id": "m"}], "max_model_len"),
    ],
)
async def test_a_server_that_does_not_tell_enough(server: Server, cards: list[dict[str, Any]], words: str) -> None:
    server.cards = cards
    with pytest.raises(ConfigError, match=words):
        async with server.running():
            pass


async def test_one_that_is_asked_all_it_may_be_is_not_dead(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions_engine, "CHECK_SECONDS", 1.0)
    server.goes_on.clear()
    async with server.running(max_connections=1) as engine:
        turns = [asyncio.create_task(engine.generate([1], {"max_tokens": 2}, "r")) for _ in range(2)]
        await server.asked.wait()
        await engine.check()
        server.goes_on.set()
        assert [turn.token_ids for turn in await asyncio.gather(*turns)] == [[7, 8]] * 2


async def test_a_server_that_dies_is_noticed(server: Server) -> None:
    async with server.running() as engine:
        await engine.check()
        await server.stop()
        with pytest.raises(EngineError, match="gives no answer"):
            await engine.check()
        with pytest.raises(EngineError, match="failed"):
            await engine.generate([1], {"max_tokens": 2}, "r")
