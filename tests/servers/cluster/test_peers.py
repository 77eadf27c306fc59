"""A replica sends to another through its direct server; what can go wrong is told apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from serve_harness import DATA, observed
from toy_tools import Puppet, picture

from verl_tool.content.parts import to_wire
from verl_tool.http.listening_socket import listen_at
from verl_tool.protocol import FaultKind, StepRequest
from verl_tool.servers.cluster.direct_server import DirectServer, guarded
from verl_tool.servers.cluster.members import Member
from verl_tool.servers.cluster.peers import (
    PeerAwayError,
    PeerBrokenError,
    Peers,
    PeerTimeoutError,
)
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.replica.asgi_app import ToolServerApp
from verl_tool.servers.replica.router import PEER_KEY_HEADER
from verl_tool.servers.replica.wire import encode_response
from verl_tool.servers.serve.ports import free_ports
from verl_tool.servers.tools import load_tools
from verl_tool.util.json_text import decode_json

ECHO = "<ray_echo>{}</ray_echo>"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    peers = Peers(request_timeout_seconds=30.0, api_key=None)
    yield peers
    await peers.close()


@pytest.fixture
async def app() -> AsyncIterator[ToolServerApp]:
    toolset = ToolSet(load_tools(str(DATA / "ray_echo.py")))
    await toolset.start()
    yield ToolServerApp(toolset, max_concurrent_requests=2, max_queued=2, peer_key="key")
    await toolset.close(grace_seconds=0.1)


@pytest.fixture
async def direct(app: ToolServerApp) -> AsyncIterator[DirectServer]:
    direct = DirectServer(listen_at("127.0.0.1", 0))
    await direct.open(guarded(app, "key"))
    yield direct
    await direct.close(grace_seconds=5.0)


def peer_at(url: str) -> Member:
    return Member(key="key", id="local", url=url)


def requests(*texts: str) -> list[StepRequest]:
    return [StepRequest(f"trajectory-{text}", ECHO.format(text), step=0) for text in texts]


async def serve_raw(handler: Handler) -> tuple[asyncio.Server, Member]:
    """Something at an address that is no tool server."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    return server, peer_at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_results_come_back_in_order(direct, peers):
    results = await peers.step(peer_at(direct.url), requests("a:0.1", "b:0", "c:0.05"))
    assert [observed(result.observation)[0] for result in results] == ["a", "b", "c"]
    assert [result.trajectory_id for result in results] == ["trajectory-a:0.1", "trajectory-b:0", "trajectory-c:0.05"]


async def test_images_pass_through_as_they_were_asked_for(peers):
    toolset = ToolSet([Puppet()])
    direct = DirectServer(listen_at("127.0.0.1", 0))
    await direct.open(guarded(ToolServerApp(toolset, peer_key="key"), "key"))
    one, two = picture(1), picture(2)
    request = StepRequest("t", "<puppet>pictures 1 2</puppet>", known_media=[two.sha256])
    results = await peers.step(peer_at(direct.url), [request])
    assert results[0].image == [to_wire(one), f"sha256:{two.sha256}"]
    sent = decode_json(encode_response(results, 0.0, None, [request.known_media]))["observations"][0]
    assert sent["image"] == results[0].image
    await direct.close(grace_seconds=5.0)
    await toolset.close(grace_seconds=0.1)


@pytest.mark.parametrize("stranger", ["another server", "another replica"])
async def test_whoever_else_is_at_its_port_runs_nothing(direct, app, stranger):
    name = "other" if stranger == "another server" else ""
    peers = Peers(request_timeout_seconds=30.0, api_key=None, server=name)
    info = Member(key="key", id="gone" if stranger == "another replica" else "local", url=direct.url)
    with pytest.raises(PeerAwayError, match="somebody else is at"):
        await peers.step(info, requests("a"))
    assert len(app.toolset) == 0
    await peers.close()


async def test_a_full_peer_is_an_overload_of_every_entry(direct, peers):
    busy = asyncio.create_task(peers.step(peer_at(direct.url), requests("a:1", "b:1", "c:1", "d:1")))
    await asyncio.sleep(0.3)
    [result] = await peers.step(peer_at(direct.url), requests("e"))
    assert result.fault is not None
    assert (result.fault.kind, result.fault.retryable) == (FaultKind.OVERLOADED, True)
    assert [result.fault for result in await busy] == [None] * 4


async def test_a_guarded_direct_server_lets_only_replicas_in(direct):
    async with aiohttp.ClientSession() as session:
        for headers, status in (({}, 401), ({PEER_KEY_HEADER: "guess"}, 401), ({PEER_KEY_HEADER: "key"}, 200)):
            async with session.get(f"{direct.url}/tools", headers=headers) as response:
                assert response.status == status


async def test_nobody_there_means_that_nothing_was_sent(peers):
    with pytest.raises(PeerAwayError) as away:
        await peers.step(peer_at(f"http://127.0.0.1:{free_ports(1)[0]}"), requests("a"))
    assert away.value.dead


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b'HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{"observations": [], "dones": [], "valids": []}   ',
        b"nonsense\r\n\r\n",
    ],
    ids=["nothing", "half an answer", "no answer of ours", "too few entries", "no HTTP"],
)
async def test_a_broken_answer_may_have_been_run(peers, answer):
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server, peer = await serve_raw(handler)
    async with server:
        with pytest.raises(PeerBrokenError):
            await peers.step(peer, requests("a"))


async def test_a_peer_that_says_nothing_is_given_up(peers):
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server, peer = await serve_raw(handler)
    async with server:
        with pytest.raises(PeerTimeoutError):
            await peers.ask(peer, "/health", seconds=0.2)
