"""Our tools in an MCP client: the SDK's own, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiohttp
import httpx2
import pytest
from live_server import LiveServer, LiveServers
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from toy_tools import Ledger, Puppet, until

from verl_tool.http.host_check import HostCheck
from verl_tool.servers.replica.mcp_endpoint import DONE_META, PATH, REWARD_META, STEP_META, TRAJECTORY_META, McpEndpoint
from verl_tool.servers.tools import load_tools

pytestmark = pytest.mark.slow

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Live:
    """A server with the route, and clients of it."""

    def __init__(self, servers: LiveServers) -> None:
        self._servers = servers
        self.server: LiveServer

    async def start(self, *tools: Any, **options: Any) -> Live:
        self.server = await self._servers.start(tools, routes=[("POST", PATH, McpEndpoint().answer)], **options)
        return self

    def client(self, mode: str = "auto", **headers: str) -> Client:
        http = httpx2.AsyncClient(headers={name.replace("_", "-"): value for name, value in headers.items()})
        return Client(streamable_http_client(self.server.url + PATH, http_client=http), mode=mode)

    async def post(self, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.server.url + PATH, data=data, headers=sent) as response,
        ):
            return response.status, json.loads(await response.read() or b"null")


@pytest.fixture
def live(servers: LiveServers) -> Live:
    return Live(servers)


def call(name: str, arguments: Any = None, **params: Any) -> dict[str, Any]:
    params = {"name": name, "arguments": arguments or {}, **params}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_lists_and_calls_the_tools(live: Live, mode: str) -> None:
    [calculator] = load_tools("calculator")
    await live.start(calculator, Puppet())
    async with live.client(mode) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools["calculator"].input_schema == dict(calculator.parameters)
        result = await client.call_tool("calculator", {"expression": "13.1-3"})
        assert (result.content[0].text, result.is_error) == ("10.1", False)
        failed = await client.call_tool("calculator", {"expression": "1/0"})
        assert failed.is_error
        assert failed.content[0].text.startswith("Error:")
        marked = await client.call_tool("puppet", {"input": "say </tool_call><result>"})
        assert marked.content[0].text == "</tool_call><result>"


async def test_a_trajectory_keeps_its_state_and_runs_a_step_once(live: Live) -> None:
    await live.start(Ledger())
    async with live.client() as client:

        async def add(entry: str, trajectory: str, step: int) -> str:
            meta: Any = {TRAJECTORY_META: trajectory, STEP_META: step}
            return (await client.call_tool("ledger", {"input": entry}, meta=meta)).content[0].text

        assert await add("bread", "a", 0) == "bread"
        assert await add("salt", "a", 1) == "bread,salt"
        assert await add("salt", "a", 1) == "bread,salt"
        assert await add("oil", "b", 0) == "oil"
        with pytest.raises(MCPError, match="sent before with another action"):
            await add("pepper", "a", 1)
        with pytest.raises(MCPError, match="lost") as lost:
            await add("x", "unknown", 7)
        assert lost.value.data["kind"] == "state_lost"
        with pytest.raises(MCPError, match="keeps state"):
            await client.call_tool("ledger", {"input": "x"})
    async with live.client(x_verl_tool_trajectory="a", x_verl_tool_step="2") as client:
        assert (await client.call_tool("ledger", {"input": "tea"})).content[0].text == "bread,salt,tea"
        other: Any = {TRAJECTORY_META: "b"}
        with pytest.raises(MCPError, match="send one of them"):
            await client.call_tool("ledger", {"input": "x"}, meta=other)


async def test_what_a_tool_answers_beside_text(live: Live) -> None:
    puppet = Puppet()
    await live.start(puppet)
    async with live.client() as client:
        image = await client.call_tool("puppet", {"input": f"image data:image/png;base64,{PIXEL}"})
        assert (image.content[1].data, image.content[1].mime_type) == (PIXEL, "image/png")
        both = await client.call_tool("puppet", {"input": "pictures 1 2"})
        assert both.content[0].text == "see <image><image> above"
        assert [(each.type, each.mime_type) for each in both.content[1:]] == [("image", "image/png")] * 2
        with pytest.raises(MCPError, match="tool puppet answers with an image that is not a data URI"):
            await client.call_tool("puppet", {"input": "image of a cat"})
        assert (await client.call_tool("puppet", {"input": "reward 0.5"})).meta[REWARD_META] == 0.5
        assert (await client.call_tool("puppet", {"input": "end well"})).meta[DONE_META] is True
        with pytest.raises(MCPError, match="RuntimeError: ouch") as crash:
            await client.call_tool("puppet", {"input": "crash ouch"})
        assert (crash.value.data["kind"], crash.value.data["retryable"]) == ("tool_crashed", False)
        with pytest.raises(MCPError, match="unknown; known: puppet"):
            await client.call_tool("pupett", {})
    assert len(live.server.app.toolset) == 0


async def test_a_trajectory_that_a_training_runs_is_shared_and_not_confused(live: Live) -> None:
    """The same ids over both routes: whoever may call the server may name any trajectory, and no step runs twice."""
    await live.start(Ledger())
    request = {"trajectory_ids": ["a"], "actions": ["<ledger>bread</ledger>"], "steps": [0]}
    url = live.server.observations_url
    async with aiohttp.ClientSession() as session, session.post(url, json=request) as response:
        assert (await response.json())["faults"] == [None]
    async with live.client() as client:
        forged: Any = {TRAJECTORY_META: "a", STEP_META: 0}
        with pytest.raises(MCPError, match="another action"):
            await client.call_tool("ledger", {"input": "bread"}, meta=forged)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({TRAJECTORY_META: "", STEP_META: 0}, "send a string of 1 to 256 printable"),
        ({TRAJECTORY_META: "a\nb"}, "printable"),
        ({TRAJECTORY_META: ["a"]}, "a list of 1"),
        ({TRAJECTORY_META: {"a": "b"}}, "an object of 1 fields"),
        ({TRAJECTORY_META: "x" * 100_000}, "printable"),
        ({TRAJECTORY_META: "a", STEP_META: -1}, "whole number"),
        ({TRAJECTORY_META: "a", STEP_META: True}, "whole number"),
        ({TRAJECTORY_META: "a", STEP_META: "1" * 5000}, "whole number"),
        ({TRAJECTORY_META: "a", STEP_META: 10**300}, "whole number"),
        ({STEP_META: 3}, "was sent with a step"),
        ("nonsense", ""),
        ([1], ""),
    ],
)
async def test_odd_meta_is_refused(live: Live, value: Any, message: str) -> None:
    puppet = Puppet()
    await live.start(puppet)
    _, answer = await live.post(call("puppet", {"input": "say hi"}, _meta=value))
    assert answer["error"]["code"] == -32602
    assert message in answer["error"]["message"]
    assert not puppet.runs


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[" * 200 + b"]" * 200, b"null", b"[]", b'{"jsonrpc": "2.0"}', b"\xff\xfe", b'"' + b"x" * 5000 + b'"'],
)
async def test_what_is_no_request_is_refused(live: Live, body: bytes) -> None:
    await live.start(Puppet())
    for headers in ({}, {"mcp_protocol_version": "2026-07-28"}, {"mcp_protocol_version": "1999"}):
        status, _ = await live.post(body, **headers)
        assert 400 <= status < 500, headers


async def test_it_is_guarded_as_the_other_routes_are(live: Live) -> None:
    puppet = Puppet()
    await live.start(puppet, api_key="secret", max_body_bytes=4096, host_check=HostCheck("127.0.0.1", None))
    request, key = call("puppet", {"input": "say hi"}), {"authorization": "Bearer secret"}
    assert (await live.post(request))[0] == 401
    assert (await live.post(request, authorization="Bearer wrong"))[0] == 401
    assert (await live.post(request, host="evil.example", **key))[0] == 403
    assert (await live.post(request, origin="http://evil.example", **key))[0] == 403
    assert (await live.post(call("puppet", {"input": "x" * 5000}), **key))[0] == 413
    assert (await live.post(request, content_type="text/html", **key))[0] == 415
    async with aiohttp.ClientSession() as session, session.get(live.server.url + PATH, headers=key) as response:
        assert (response.status, response.headers["allow"]) == (405, "POST")
    assert not puppet.runs
    async with live.client(**key) as client:
        assert (await client.call_tool("puppet", {"input": "say hi"})).content[0].text == "hi"


async def test_a_slow_tool_times_out_and_a_full_queue_is_told(live: Live) -> None:
    puppet = Puppet()
    await live.start(puppet, request_timeout_seconds=0.5, max_concurrent_requests=1, max_queued=0)
    slow = asyncio.create_task(live.post(call("puppet", {"input": "sleep 9"})))
    await until(lambda: bool(puppet.runs))
    status, answer = await live.post(call("puppet", {"input": "say hi"}))
    assert (status, answer["error"]["type"]) == (503, "overloaded")
    status, answer = await slow
    assert answer["error"]["data"]["kind"] == "timeout"
    assert puppet.ended == []


async def test_a_client_that_leaves_stops_its_call(live: Live) -> None:
    puppet = Puppet()
    await live.start(puppet)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(live.post(call("puppet", {"input": "sleep 30"})), 1.0)
    await until(lambda: not live.server.app.admission.inside)
    assert puppet.ended == []


async def test_without_the_sdk_it_says_what_to_install(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    await live.start(Puppet())
    monkeypatch.setitem(sys.modules, "mcp.server.lowlevel", None)
    status, answer = await live.post(call("puppet"))
    assert (status, answer["error"]["type"]) == (501, "mcp_missing")
    assert "verl-tool[mcp]" in answer["error"]["message"]
