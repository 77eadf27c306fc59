"""Programs reach their own sessions at an endpoint, and nothing else of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import pytest
from live_endpoint import LiveEndpoint, live_endpoint
from live_server import serve_asgi

openai = pytest.importorskip("openai")

from eval_service.evaluation.session_relay import RemoteSession, SessionRelay  # noqa: E402
from verl_tool.agent_loop.trajectory import Trajectory  # noqa: E402

QUESTION: list[Any] = [{"role": "user", "content": "How warm is it?"}]


@dataclass
class Relayed:
    url: str
    endpoint: LiveEndpoint
    relay: SessionRelay
    session: RemoteSession

    def agent(self, **options: Any) -> Any:
        usual = {"base_url": f"{self.url}/sessions/{self.session.id}/v1", "max_retries": 0}
        client = openai.AsyncOpenAI(api_key=self.session.key, **usual | options)
        self.endpoint.clients.append(client)
        return client

    async def rollout(self) -> Trajectory:
        async with httpx.AsyncClient(base_url=self.endpoint.url) as http:
            finished = await http.post(f"/sessions/{self.session.id}/finish", json={})
        return Trajectory.from_json(json.dumps(finished.json()["trajectory"]))


@asynccontextmanager
async def relayed(text: str = "Warm.", pause: float = 0.0, timeout: float = 30.0) -> AsyncIterator[Relayed]:
    async with (
        live_endpoint(lambda _: text, pause=pause) as endpoint,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as http,
    ):
        opened = await (await http.post(f"{endpoint.url}/sessions", json={})).json()
        relay = SessionRelay(http)
        session = RemoteSession(opened["id"], opened["key"], endpoint.url)
        relay.sessions[session.id] = session
        url, server, task = await serve_asgi(relay)
        yield Relayed(url, endpoint, relay, session)
        server.should_exit = True
        await task


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_passed_on_and_recorded(stream: bool) -> None:
    async with relayed() as relay:
        if stream:
            async with relay.agent().chat.completions.stream(model="m", messages=QUESTION) as events:
                answer = await events.get_final_completion()
        else:
            answer = await relay.agent().chat.completions.create(model="m", messages=QUESTION)
        assert answer.choices[0].message.content == "Warm."
        assert (await relay.rollout()).model_text == "Warm.<|im_end|>"


async def test_an_attempt_that_broke_is_joined_and_nothing_is_sampled_twice() -> None:
    async with relayed("x" * 100, pause=0.01) as relay:
        with pytest.raises(openai.APITimeoutError):
            await relay.agent(timeout=0.3).chat.completions.create(model="m", messages=QUESTION)
        answer = await relay.agent().chat.completions.create(model="m", messages=QUESTION)
        assert answer.choices[0].message.content == "x" * 100
        assert len(relay.endpoint.engine.params) == 1
        assert (await relay.rollout()).num_turns == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/sessions", 404),
        ("GET", "/sessions/ID", 405),
        ("DELETE", "/sessions/ID", 405),
        ("POST", "/sessions/ID/finish", 404),
        ("POST", "/sessions/ID/v1/../finish", 404),
        ("POST", "/sessions/%2e%2e/v1/chat/completions", 401),
        ("POST", "/sessions/OTHER/v1/chat/completions", 401),
        ("POST", "/v1/chat/completions", 404),
        ("GET", "/metrics", 404),
    ],
)
async def test_the_rest_of_the_endpoint_is_out_of_reach(method: str, path: str, status: int) -> None:
    async with relayed() as relay:
        body = json.dumps({"model": "toy", "messages": QUESTION}).encode()
        other = (await httpx.AsyncClient(base_url=relay.endpoint.url).post("/sessions", json={})).json()
        raw = path.replace("ID", relay.session.id).replace("OTHER", other["id"])
        headers = b"host: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        head = f"{method} {raw} HTTP/1.1\r\n".encode() + headers + b"content-length: %d\r\n\r\n" % len(body)
        host, port = relay.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + body)
        answer = await reader.read()
        writer.close()
        assert answer.split()[1] == str(status).encode(), answer[:300]
        assert relay.endpoint.engine.params == []
        assert not relay.endpoint.endpoint.gateway.sessions[relay.session.id].is_finished


async def test_an_endpoint_that_gives_no_answer_is_a_failure_until_it_gives_one() -> None:
    async with relayed("x" * 100, pause=0.01, timeout=0.3) as relay:
        with pytest.raises(openai.InternalServerError, match="gave no answer"):
            await relay.agent().chat.completions.create(model="m", messages=QUESTION)
        assert relay.session.failure is not None
        await asyncio.sleep(1.5)
        await relay.agent().chat.completions.create(model="m", messages=QUESTION)
        assert relay.session.failure is None
