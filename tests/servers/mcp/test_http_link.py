"""MCP servers over HTTP: our own endpoint, the SDK's server-sent events, and servers that mean no good."""

from __future__ import annotations

import asyncio
import gzip
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from live_server import LiveServers, serve_asgi
from local_server import serve
from mcp.server.mcpserver import MCPServer
from test_tool import ask, serving
from toy_tools import Puppet

from verl_tool.errors import VerlToolError
from verl_tool.protocol import FaultKind
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.mcp import bounds
from verl_tool.servers.mcp.catalog import ask_all
from verl_tool.servers.mcp.config import McpConfig
from verl_tool.servers.mcp.tool import mcp_tools
from verl_tool.servers.replica.mcp_endpoint import PATH, McpEndpoint

pytestmark = pytest.mark.slow

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def at(url: str, **settings: Any) -> McpConfig:
    return McpConfig.parse({"mcpServers": {"s": {"url": url, "timeout_seconds": 30, "start_seconds": 40, **settings}}})


@asynccontextmanager
async def hostile(call: Answer, listed: Answer | None = None) -> AsyncIterator[str]:
    """The URL of a server that lists one tool, and answers calls of it (and the list, if given) as told."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        if message["method"] == "tools/call":
            return await call(request, message)
        if message["method"] == "tools/list":
            if listed is not None:
                return await listed(request, message)
            return result(message, {"tools": [{"name": "f", "inputSchema": {"type": "object"}}]})
        if message["method"] == "initialize":
            info = {"name": "s", "version": "1"}
            version = message["params"]["protocolVersion"]
            return result(message, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        if "id" not in message:
            return web.Response(status=202)
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "no"}})

    async with serve(web.route("*", "/mcp", handle)) as url:
        yield f"{url}/mcp"


def result(message: dict[str, Any], value: Any, **options: Any) -> web.Response:
    return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": value}, **options)


async def test_our_own_server_behind_ours(servers: LiveServers) -> None:
    live = await servers.start([Puppet()], routes=[("POST", PATH, McpEndpoint().answer)], api_key="secret")
    key = {"Authorization": "Bearer secret"}
    for stateful in (True, False):
        async with serving(at(live.url + PATH, headers=key, stateful=stateful, timeout_seconds=3)) as toolset:
            result = await ask(toolset, "s__puppet", {"input": "say hi"})
            assert (result.observation, result.fault) == ("hi", None)
            unknown = await ask(toolset, "s__puppet", {"input": "crash ouch"})
            assert unknown.observation.startswith("Error: tool puppet: RuntimeError: ouch")
            slow = (await ask(toolset, "s__puppet", {"input": "sleep 30"}, trajectory="slow")).fault
            assert slow is not None
            assert slow.kind is FaultKind.TIMEOUT
    found = (await ask_all(at(live.url + PATH)))["s"]
    assert isinstance(found, VerlToolError)
    assert "cannot be reached" in str(found)


async def test_server_sent_events() -> None:
    server = MCPServer("sse")
    counts: list[str] = []

    @server.tool()
    def add(a: int, b: int) -> int:
        """Adds."""
        counts.append(f"{a}+{b}")
        return a + b

    url, uvicorn_server, task = await serve_asgi(server.sse_app())
    try:
        async with serving(at(f"{url}/sse", type="sse")) as toolset:
            assert (await ask(toolset, "s__add", {"a": 1, "b": 2})).observation == "3"
            wrong = await ask(toolset, "s__add", {"a": "x"})
            assert (wrong.fault, wrong.metrics) == (None, {"error": 1.0})
        assert counts == ["1+2"]
    finally:
        uvicorn_server.should_exit = True
        await asyncio.wait_for(task, 10)


async def kinds(toolset: ToolSet, calls: int) -> list[str]:
    faults = [(await ask(toolset, "s__f")).fault for _ in range(calls)]
    return ["none" if fault is None else fault.kind.value for fault in faults]


async def hang(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def fail(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=502, text="bad gateway")


async def large(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    return result(message, {"content": [{"type": "text", "text": "x" * (5 << 20)}]})


async def bomb(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {"content": [], "x": "0" * (50 << 20)}})
    packed = await asyncio.to_thread(gzip.compress, body.encode(), 1)
    return web.Response(body=packed, headers={"content-type": "application/json", "content-encoding": "gzip"})


async def endless(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 200_000}}
    while True:
        await response.write(f"event: message\ndata: {json.dumps(note)}\n\n".encode())


async def cut(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def nonsense(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="<html>", content_type="text/html")


async def elsewhere(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=307, headers={"location": "http://127.0.0.1:1/stolen"})


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (hang, "timeout"),
        (fail, "tool_crashed"),
        (large, "tool_crashed"),
        (bomb, "tool_crashed"),
        (endless, "tool_crashed"),
        (cut, "tool_crashed"),
    ],
)
async def test_a_bad_answer_is_a_fault_and_the_next_call_connects_anew(call: Answer, kind: str) -> None:
    patience = 1 if kind == "timeout" else 30
    async with hostile(call) as url, serving(at(url, stateful=False, timeout_seconds=patience)) as toolset:
        assert await kinds(toolset, 2) == [kind, kind]


@pytest.mark.parametrize("call", [nonsense, elsewhere])
async def test_what_is_no_answer_is_told_to_the_model(call: Answer) -> None:
    async with hostile(call) as url, serving(at(url, stateful=False)) as toolset:
        answer = await ask(toolset, "s__f")
        assert answer.observation.startswith("Error: ")


@pytest.mark.parametrize("listed", [hang, fail, large, bomb, endless, cut, nonsense])
async def test_a_server_that_does_not_list_its_tools_is_refused_in_time(listed: Answer) -> None:
    async with hostile(fail, listed) as url:
        found = (await ask_all(at(url, start_seconds=1.5)))["s"]
        assert isinstance(found, VerlToolError)


async def test_a_server_cannot_have_its_client_ask_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_PARTS", 60)
    asked, sessions = 0, set[str]()

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        if request.method == "GET":
            asked += 1
            session = request.headers["mcp-session-id"]
            # Then no answer has a byte, and the client is to come again at once.
            text = "" if session in sessions else "retry: 0\nid: 1\ndata:\n\n"
            sessions.add(session)
            return web.Response(text=text, content_type="text/event-stream")
        if request.method == "DELETE":
            return web.Response()
        message = await request.json()
        if message["method"] == "initialize":
            value = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
            return result(message, value, headers={"mcp-session-id": secrets.token_hex(8)})
        if message["method"] == "tools/list":
            return result(message, {"tools": [{"name": "f", "inputSchema": {"type": "object"}}]})
        return web.Response(status=202) if "id" not in message else web.Response(status=400)

    async def until_it_stops() -> None:
        before = -1
        while asked != before:
            before = asked
            await asyncio.sleep(1.0)

    async with serve(web.route("*", "/mcp", handle)) as url, serving(at(f"{url}/mcp", stateful=False)):
        await asyncio.wait_for(until_it_stops(), 30)
    assert asked > 10


async def test_arguments_in_headers_are_refused() -> None:
    async def listed(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
        return result(message, {"tools": [{"name": "f", "inputSchema": schema}]})

    async with hostile(fail, listed) as url:
        found = (await ask_all(at(url)))["s"]
        assert isinstance(found, VerlToolError)
        assert "x-mcp-header" in str(found)


async def test_a_server_that_is_gone_is_unreachable_and_the_step_may_be_sent_again() -> None:
    async with hostile(fail) as url:
        config = at(url)
        found = (await ask_all(config))["s"]
    assert not isinstance(found, VerlToolError)
    toolset = ToolSet(mcp_tools(config, found))
    with pytest.raises(VerlToolError, match="cannot be reached"):
        await toolset.start()
    fault = (await ask(toolset, "s__f")).fault
    assert fault is not None
    assert (fault.kind, fault.retryable) == (FaultKind.UNREACHABLE, True)
    await toolset.close()
