"""What clients send to a port, before any application sees it."""

from __future__ import annotations

import asyncio
import json

import pytest
from live_server import LiveServer, LiveServers
from toy_tools import Puppet

from verl_tool.http import http_protocol
from verl_tool.http.request_body import RequestBodies

POST = b"POST /get_observation HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
NEVER_ENDING = {
    "nothing": b"",
    "half a line": b"GET /hea",
    "half a header": GET + b"X: ",
    "empty lines": b"\r\n\r\n",
    "a second request that stops": GET + b"\r\n" + GET + b"X: ",
    "a body that stops": POST + b"Content-Length: 100\r\n\r\n{",
    "a chunked body that stops": POST + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n',
}
MALFORMED = {
    "no http": b"GARBAGE\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 100,
    "http 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a long head": GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": GET + b"".join(b"X%d: 1\r\n" % i for i in range(500)) + b"\r\n",
    "a long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "two lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "a length and chunks": POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": POST + b"Content-Length: -1\r\n\r\n",
    "a huge length": POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "an unknown encoding": POST + b"Transfer-Encoding: gzip\r\n\r\n{}",
    "chunked twice": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a wrong chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a wrong chunk later": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n-1\r\n",
    "a long trailer": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: " + b"a" * 300_000,
    "a folded header": GET + b"X: a\r\n b\r\n\r\n",
    "a header with a nul": GET + b"X: a\x00b\r\n\r\n",
    "an unknown method": b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "connect": b"CONNECT example.com:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a star": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "too large": POST + b"Content-Length: 9000000\r\n\r\n" + b"x" * 500_000,
}


@pytest.fixture
async def server(servers: LiveServers, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    """A server that waits for a second where others wait for ten."""
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(http_protocol, "LINGER_SECONDS", 0.5)
    return await servers.start([Puppet()], bodies=RequestBodies(grace_seconds=1.0))


async def sent(server: LiveServer, data: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


async def still_serves(server: LiveServer) -> bool:
    return (await sent(server, GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


def last_answer(data: bytes) -> tuple[int, dict[str, str]]:
    """Status and error of the last answer."""
    head, _, body = data.rpartition(b"\r\n\r\n")
    return int(head.rpartition(b"HTTP/1.1 ")[2][:3]), json.loads(body)["error"]


async def test_what_never_ends_is_ended(server: LiveServer) -> None:
    answers = await asyncio.gather(*(sent(server, data) for data in NEVER_ENDING.values()))
    for name, data in zip(NEVER_ENDING, answers, strict=True):
        assert last_answer(data)[0] == 408, name
    assert await still_serves(server)
    assert server.app.bodies.held == 0


async def test_what_is_malformed_is_refused_in_our_form(server: LiveServer) -> None:
    answers = await asyncio.gather(*(sent(server, data) for data in MALFORMED.values()))
    for name, data in zip(MALFORMED, answers, strict=True):
        status, error = last_answer(data)
        assert 400 <= status < 500, name
        assert error["message"], name
    assert await still_serves(server)
    assert server.app.bodies.held == 0


async def test_a_body_that_drips_is_ended(server: LiveServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(POST + b"Content-Length: 1000\r\n\r\n")

    async def drip() -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.1)

    dripping = asyncio.create_task(drip())
    assert b"408" in await asyncio.wait_for(reader.readline(), 20)
    dripping.cancel()
    writer.close()


async def test_an_upgrade_is_passed_over(server: LiveServer) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    assert (await sent(server, GET + upgrade + b"\r\n")).startswith(b"HTTP/1.1 200")


async def test_more_connections_than_allowed_are_told_to_come_later(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "max_connections", lambda: 3)
    host, port = server.url.removeprefix("http://").split(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
    refused = await sent(server, b"")
    assert refused.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in refused
    for _, writer in idle:
        writer.close()
    # Those that only wait are gone after their time.
    await asyncio.sleep(0.5)
    assert await still_serves(server)


async def test_bodies_held_are_bounded_and_small_ones_still_pass(servers: LiveServers) -> None:
    bodies = RequestBodies(max_body_bytes=4 << 20, max_held_bytes=8 << 20, grace_seconds=20.0)
    server = await servers.start([Puppet()], bodies=bodies)
    host, port = server.url.removeprefix("http://").split(":")
    unfinished = []
    for _ in range(6):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(POST + b"Content-Length: 4000000\r\n\r\n" + b" " * 3_900_000)
        unfinished.append((reader, writer))
    firsts = [asyncio.create_task(reader.readline()) for reader, _ in unfinished]
    done, _ = await asyncio.wait(firsts, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert done
    assert all(b" 503 " in each.result() for each in done)
    assert bodies.held <= 4 << 20
    body = b'{"trajectory_ids": ["a"], "actions": ["<puppet>say hi</puppet>"]}'
    answer = await sent(server, POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 200")
    for first, (_, writer) in zip(firsts, unfinished, strict=True):
        first.cancel()
        writer.close()
