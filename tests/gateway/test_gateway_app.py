"""The gateway over HTTP: real clients, broken connections, and callers that mean harm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
import pytest
from agent_sessions import WritingGenerator
from live_server import serve_asgi
from real_templates import TemplateTokenizer
from template_families import QWEN, TOOL, hermes

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.trajectory import Excluded, Trajectory
from verl_tool.errors import ToolFault
from verl_tool.formats import format_by_name
from verl_tool.gateway.gateway_app import Gateway, GatewayOptions
from verl_tool.gateway.session import SessionModel
from verl_tool.http.host_check import HostCheck
from verl_tool.http.listening_socket import bind_at, listen_at
from verl_tool.protocol import FaultKind
from verl_tool.servers.cluster.direct_server import DirectServer

TOKENIZER = TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN)
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it?"}]
CALL = hermes([("", "Oslo")])


class SlowGenerator(WritingGenerator):
    """Waits for `go` before each answer."""

    def __init__(self, turns: list[str]) -> None:
        super().__init__(TOKENIZER, turns)
        self.go = asyncio.Event()
        self.go.set()
        self.failures: list[Exception] = []

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        self.params = sampling_params
        if self.failures:
            raise self.failures.pop()
        await self.go.wait()
        return await super().generate(prompt_ids, sampling_params, request_id)


@dataclass
class LiveGateway:
    url: str
    gateway: Gateway
    generator: SlowGenerator
    http: httpx.AsyncClient

    async def open(self, **options: Any) -> dict[str, Any]:
        answer = await self.http.post("/sessions", json=options)
        assert answer.status_code == 201, answer.text
        opened: dict[str, Any] = answer.json()
        return opened

    async def finish(self, session: dict[str, Any], reward: float = 1.0) -> Trajectory:
        answer = await self.http.post(f"/sessions/{session['id']}/finish", json={"reward": reward})
        return Trajectory.from_json(json.dumps(answer.json()["trajectory"]))

    def openai(self, session: dict[str, Any], **options: Any) -> openai.AsyncOpenAI:
        base = self.url + session["paths"]["openai"]
        return openai.AsyncOpenAI(base_url=base, api_key=session["key"], max_retries=0, **options)

    def anthropic(self, session: dict[str, Any]) -> anthropic.AsyncAnthropic:
        base = self.url + session["paths"]["anthropic"]
        return anthropic.AsyncAnthropic(base_url=base, api_key=session["key"], max_retries=0)


@asynccontextmanager
async def live(*turns: str, **options: Any) -> AsyncIterator[LiveGateway]:
    generator = SlowGenerator([f"{turn.removesuffix('<|im_end|>')}<|im_end|>" for turn in turns])
    model = SessionModel.create(generator, TOKENIZER, [format_by_name("hermes")], 1 << 16)
    gateway = Gateway(model, GatewayOptions(**options))
    url, server, serving = await serve_asgi(gateway.app())
    async with httpx.AsyncClient(base_url=url) as http:
        yield LiveGateway(url, gateway, generator, http)
    await gateway.close()
    server.should_exit = True
    await serving


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_speaks_chat(stream: bool) -> None:
    async with live(CALL, "Warm.") as gateway:
        session = await gateway.open()
        client = gateway.openai(session)
        messages: list[Any] = list(ASKED)
        for _ in range(2):
            if stream:
                async with client.chat.completions.stream(model="m", messages=messages, tools=[TOOL]) as events:
                    completion = await events.get_final_completion()
            else:
                completion = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls or ():
                assert json.loads(call.function.arguments) == {"city": "Oslo"}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
        assert messages[-1]["content"] == "Warm."
        rollout = await gateway.finish(session, 0.5)
    assert (len(rollout.rows), rollout.num_turns, rollout.reward) == (1, 2, 0.5)
    assert [TOKENIZER.decode(s.tokens) for s in rollout.response if s.generated] == [CALL, "Warm.<|im_end|>"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_speaks_responses(stream: bool) -> None:
    async with live(CALL, "Warm.") as gateway:
        session = await gateway.open()
        client = gateway.openai(session)
        tool: Any = {"type": "function", "strict": None, **TOOL["function"]}
        items: list[Any] = list(ASKED)
        for _ in range(2):
            asked: dict[str, Any] = {"model": "m", "input": items, "tools": [tool], "store": False}
            if stream:
                async with client.responses.stream(**asked) as events:
                    response = await events.get_final_response()
            else:
                response = await client.responses.create(**asked)
            for item in response.output:
                items.append(item.model_dump(exclude_none=True, exclude={"parsed_arguments", "parsed"}))
                if item.type == "function_call":
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "7"})
        assert response.output_text == "Warm."
        rollout = await gateway.finish(session)
    assert (len(rollout.rows), rollout.num_turns) == (1, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_speaks_messages(stream: bool) -> None:
    async with live(CALL, "Warm.") as gateway:
        session = await gateway.open()
        client = gateway.anthropic(session)
        function = TOOL["function"]
        tools: Any = [{"name": function["name"], "input_schema": function["parameters"]}]
        messages: list[Any] = list(ASKED)
        for _ in range(2):
            asked: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": messages, "tools": tools}
            if stream:
                async with client.messages.stream(**asked) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**asked)
            messages.append(
                {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in message.content]}
            )
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "7"}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "user", "content": results}] if results else []
        assert message.content[0].text == "Warm."
        counted = await client.messages.count_tokens(model="m", messages=messages[:1])
        assert counted.input_tokens > 0
        rollout = await gateway.finish(session)
    assert (len(rollout.rows), rollout.num_turns) == (1, 2)


async def test_a_session_is_known_by_its_key_or_a_header_too() -> None:
    async with live("One.", "Two.") as gateway:
        session = await gateway.open()
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session["key"], max_retries=0)
        await client.chat.completions.create(model="m", messages=ASKED)  # type: ignore[arg-type]
        foreign = openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="x", default_headers={"X-Session-ID": session["id"]}, max_retries=0
        )
        await foreign.chat.completions.create(model="m", messages=[*ASKED, *ASKED])  # type: ignore[list-item]
        with pytest.raises(openai.AuthenticationError, match="no open session"):
            await client.with_options(api_key="wrong").chat.completions.create(model="m", messages=ASKED)  # type: ignore[arg-type]
        assert (await gateway.http.get(f"/sessions/{session['id']}")).json()["turns"] == 2


async def test_a_retry_after_a_broken_connection_gets_the_same_answer() -> None:
    async with live("One.", "Two.") as gateway:
        session = await gateway.open()
        client = gateway.openai(session)
        gateway.generator.go.clear()
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).chat.completions.create(model="m", messages=ASKED)  # type: ignore[arg-type]
        again = asyncio.ensure_future(client.chat.completions.create(model="m", messages=ASKED))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        gateway.generator.go.set()
        assert (await again).choices[0].message.content == "One."
        assert len(gateway.generator.prompts) == 1
        sampled = await client.chat.completions.create(model="m", messages=ASKED)  # type: ignore[arg-type]
        assert sampled.choices[0].message.content == "Two."


async def test_an_engine_failure_is_reported_and_the_next_request_is_sampled() -> None:
    async with live("One.") as gateway:
        session = await gateway.open()
        client = gateway.openai(session)
        gateway.generator.failures = [ToolFault(FaultKind.UNREACHABLE, "the engine is away", retryable=True)]
        with pytest.raises(openai.InternalServerError, match="the engine is away"):
            await client.chat.completions.create(model="m", messages=ASKED)  # type: ignore[arg-type]
        assert gateway.gateway.sessions[session["id"]].engine_failure
        await client.chat.completions.create(model="m", messages=ASKED)  # type: ignore[arg-type]
        assert (await gateway.finish(session)).fault is None


async def test_a_session_that_an_engine_failure_ended_is_a_fault() -> None:
    async with live() as gateway:
        session = await gateway.open()
        gateway.generator.failures = [ToolFault(FaultKind.UNREACHABLE, "the engine is away", retryable=True)]
        with pytest.raises(openai.InternalServerError):
            await gateway.openai(session).chat.completions.create(model="m", messages=ASKED)  # type: ignore[arg-type]
        rollout = await gateway.finish(session)
    assert rollout.excluded is Excluded.FAULT
    assert "the engine is away" in rollout.fault.message


async def test_a_session_samples_as_it_was_opened_whatever_the_agent_asks_for() -> None:
    async with live("One.") as gateway:
        session = await gateway.open(sampling={"temperature": 0.25}, max_tokens=50)
        client = gateway.openai(session)
        await client.chat.completions.create(model="m", messages=ASKED, temperature=0, top_p=0.1, stop=["x"])  # type: ignore[arg-type]
        params = gateway.generator.params
    assert (params["temperature"], params["max_tokens"], params["stop"]) == (0.25, 50, ["x"])
    assert "top_p" not in params


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/chat/completions", {"model": "m", "messages": ASKED, "n": 2}, 400, "n"),
    ("/v1/chat/completions", {"model": "m", "messages": []}, 400, "messages"),
    ("/v1/messages", {"model": "m", "messages": "x", "max_tokens": 1}, 400, "messages"),
    ("/v1/responses", {"model": "m", "input": 5}, 400, "input"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), BAD)
async def test_a_wrong_request_names_its_field(path: str, body: dict[str, Any], status: int, words: str) -> None:
    async with live() as gateway:
        session = await gateway.open()
        answer = await gateway.http.post(f"/sessions/{session['id']}{path}", json=body)
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]


async def test_hostile_callers_get_nothing() -> None:
    async with live("One.", max_sessions=2, admin_key="boss") as gateway:
        http = gateway.http
        assert (await http.post("/sessions", json={})).status_code == 401
        headers = {"authorization": "Bearer boss"}
        opened = (await http.post("/sessions", json={"id": "a", "max_turns": 1}, headers=headers)).json()
        assert (await http.post("/sessions", json={"id": "a"}, headers=headers)).status_code == 409
        assert (await http.post("/sessions", json={"id": "b"}, headers=headers)).status_code == 201
        assert (await http.post("/sessions", json={"id": "c"}, headers=headers)).status_code == 503
        assert (await http.post("/sessions", json={"max_turn": 1}, headers=headers)).status_code == 400
        own = {"authorization": f"Bearer {opened['key']}"}
        for method, path in (("GET", "/sessions/b"), ("DELETE", "/sessions/b"), ("POST", "/sessions/a/finish")):
            assert (await http.request(method, path, headers=own)).status_code == 401
        chat = {"model": "m", "messages": ASKED}
        foreign = await http.post("/sessions/b/v1/chat/completions", json=chat, headers=own)
        assert (foreign.status_code, foreign.json()["error"]["message"][:20]) == (403, "the API key is that ")
        named = {**own, "x-session-id": "b"}
        assert (await http.post("/v1/chat/completions", json=chat, headers=named)).status_code == 403
        assert (await http.post("/sessions/nobody/v1/chat/completions", json=chat)).status_code == 404
        assert (await http.post("/sessions/a/v1/chat/completions", content=b"[" * 100_000)).status_code == 400
        assert (await http.post("/sessions/a/v1/chat/completions", json=chat)).status_code == 200
        more = await http.post("/sessions/a/v1/chat/completions", json=chat)
        assert "max_turns=1" in more.json()["error"]["message"]
        assert (await http.post("/sessions/a/finish", json={"reward": "much"}, headers=headers)).status_code == 400
        assert (await http.post("/sessions/a/finish", json={"reward": 1}, headers=headers)).status_code == 200
        late = await http.post("/sessions/a/v1/chat/completions", json=chat)
        assert "finished" in late.json()["error"]["message"]


async def test_finishing_cancels_what_is_sampled_and_may_be_repeated() -> None:
    async with live("One.", "Two.") as gateway:
        session = await gateway.open()
        client = gateway.openai(session)
        await client.chat.completions.create(model="m", messages=ASKED)  # type: ignore[arg-type]
        gateway.generator.go.clear()
        waiting = asyncio.ensure_future(client.chat.completions.create(model="m", messages=[*ASKED, *ASKED]))  # type: ignore[list-item]
        await asyncio.sleep(0.1)
        first = await gateway.finish(session, 0.5)
        with pytest.raises(openai.APIError):
            await waiting
        assert (await gateway.finish(session, 0.9)).reward == first.reward == 0.5
        assert first.num_turns == 1


async def test_an_idle_session_is_closed() -> None:
    async with live(idle_seconds=0.05) as gateway:
        session = await gateway.open()
        await asyncio.sleep(0.1)
        await gateway.open()
        assert (await gateway.http.get(f"/sessions/{session['id']}")).status_code == 404


async def test_probes_and_the_list_of_models() -> None:
    async with live(model_name="tiny") as gateway:
        session = await gateway.open()
        assert (await gateway.http.head(f"/sessions/{session['id']}")).status_code == 200
        assert (await gateway.http.head("/")).status_code == 200
        models = await gateway.openai(session).models.list()
        assert [model.id for model in models.data] == ["tiny"]


async def test_identical_requests_at_once_are_bounded_and_finishing_stops_all() -> None:
    async with live(*["One."] * 9) as gateway:
        session = await gateway.open(max_turns=3)
        gateway.generator.go.clear()
        path = f"/sessions/{session['id']}/v1/chat/completions"
        asked = [
            asyncio.ensure_future(gateway.http.post(path, json={"model": "m", "messages": ASKED})) for _ in range(6)
        ]
        await asyncio.sleep(1.5)
        running = gateway.gateway.sessions[session["id"]]
        assert running.num_requests == 3
        await gateway.finish(session)
        statuses = sorted([(await each).status_code for each in asked])
        assert statuses == [400, 400, 400, 500, 500, 500]
        assert not gateway.generator.prompts


async def test_agents_cannot_open_or_finish_sessions_on_their_own_application() -> None:
    async with live("One.") as gateway:
        url, server, serving = await serve_asgi(gateway.gateway.app(for_agents=True))
        session = await gateway.open()
        async with httpx.AsyncClient(base_url=url) as http:
            own = f"/sessions/{session['id']}"
            for method, path in (("POST", "/sessions"), ("DELETE", own), ("POST", f"{own}/finish"), ("GET", own)):
                assert (await http.request(method, path, json={})).status_code in (404, 405)
            assert (await http.post(f"{own}/v1/chat/completions", json={"messages": ASKED})).status_code == 200
        server.should_exit = True
        await serving


async def test_finished_sessions_make_room_and_odd_arguments_are_named() -> None:
    async with live(max_sessions=1) as gateway:
        for number in range(3):
            session = await gateway.open(id=f"s{number}")
            for body in ({"reward": True}, {"reward": 1e300}, {"extra": [1]}):
                assert (await gateway.http.post(f"/sessions/s{number}/finish", json=body)).status_code == 400
            await gateway.finish(session)
        assert (await gateway.http.post("/sessions", json={"id": "a/b"})).status_code == 400


@dataclass
class Replica:
    gateway: Gateway
    servers: list[DirectServer]


@asynccontextmanager
async def replicas(number: int) -> AsyncIterator[tuple[str, list[Replica]]]:
    """Gateways that share a port, each at one of its own, too. Yields the shared URL."""
    made: list[Replica] = []
    port = 0
    for _ in range(number):
        own, shared = listen_at("127.0.0.1", 0), bind_at("127.0.0.1", port, shared=True)
        port = shared.getsockname()[1]
        model = SessionModel.create(
            SlowGenerator(["Warm.<|im_end|>"] * 20), TOKENIZER, [format_by_name("hermes")], 1 << 16
        )
        gateway = Gateway(model, GatewayOptions(own_port=own.getsockname()[1]))
        servers = [DirectServer(own), DirectServer(shared)]
        for server in servers:
            await server.open(gateway.app(host_check=HostCheck("127.0.0.1", port)))
        made.append(Replica(gateway, servers))
    yield f"http://127.0.0.1:{port}", made
    for replica in made:
        await replica.gateway.close()
        for server in replica.servers:
            await server.close(1.0)


async def test_a_session_is_found_at_the_port_of_the_replica_that_has_it() -> None:
    async with replicas(2) as (url, made):
        opened = []
        for _ in range(20):
            # A connection each, which the kernel gives to either.
            async with httpx.AsyncClient(base_url=url) as http:
                opened.append((await http.post("/sessions", json={})).json())
        assert sum(len(replica.gateway.sessions) for replica in made) == 20
        assert {session["port"] for session in opened} <= {replica.gateway.options.own_port for replica in made}
        for session in opened:
            own = f"http://localhost:{session['port']}"
            agent = openai.AsyncOpenAI(base_url=own + session["paths"]["openai"], api_key=session["key"], max_retries=0)
            answer = await agent.chat.completions.create(model="m", messages=ASKED)
            assert answer.choices[0].message.content == "Warm."
            await agent.close()
        one = opened[0]
        other = next(replica for replica in made if one["id"] not in replica.gateway.sessions)
        async with httpx.AsyncClient() as http:
            lost = await http.get(f"{other.servers[0].url}/sessions/{one['id']}")
            found = await http.post(f"http://127.0.0.1:{one['port']}/sessions/{one['id']}/finish", json={})
    assert (lost.status_code, found.status_code) == (404, 200)
    assert "use the port that POST /sessions gave" in lost.text
    assert Trajectory.from_json(json.dumps(found.json()["trajectory"])).model_text == "Warm.<|im_end|>"
