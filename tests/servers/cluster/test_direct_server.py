"""Stopping a listener: what the kernel has taken for it is served."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from verl_tool.servers.cluster.direct_server import DirectServer

CLIENTS = 40


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": b"hello"})


def ask(server: DirectServer) -> socket.socket:
    """A connection with a request on it, which nobody has accepted."""
    port = int(server.url.rpartition(":")[2])
    client = socket.create_connection(("127.0.0.1", port), timeout=5)
    client.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    return client


def answer(client: socket.socket) -> bytes:
    with client:
        data = b""
        while part := client.recv(65536):
            data += part
        return data


async def test_connections_that_wait_are_served_and_no_later_one_is_taken():
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    listener.setblocking(False)
    server = DirectServer(listener)
    await server.open(hello)
    try:
        clients = [ask(server) for _ in range(CLIENTS)]
        time.sleep(0.05)  # noqa: ASYNC251  the event loop is busy meanwhile
        await server.stop_accepting()
        answers = await asyncio.gather(*(asyncio.to_thread(answer, client) for client in clients))
        assert [b"hello" in each for each in answers] == [True] * CLIENTS
        with pytest.raises(ConnectionRefusedError):
            ask(server)
    finally:
        await server.close(1.0)
