"""A program that means harm, at the socket of its session."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from agent_sessions import make_session
from real_templates import TemplateTokenizer
from template_families import QWEN

from verl_tool.gateway import gateway_app
from verl_tool.gateway.gateway_app import Gateway
from verl_tool.gateway.program import session_socket
from verl_tool.gateway.program.session_socket import listen_for
from verl_tool.http import http_protocol, request_body

BODY = json.dumps({"messages": [{"role": "user", "content": "How warm is it?"}]}).encode()


def make() -> Gateway:
    return Gateway(make_session(TemplateTokenizer("Qwen-Qwen3-0.6B", QWEN), ["Warm.<|im_end|>"] * 9).model)


def post(path: str, body: bytes = BODY, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def send(socket: Path, *pieces: bytes) -> int:
    """Status of the answer to `pieces`."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        for piece in pieces:
            writer.write(piece)
        return int((await asyncio.wait_for(reader.readline(), 20)).split()[1])
    finally:
        writer.close()


CHAT = "/sessions/{}/v1/chat/completions"


def serve(gateway: Gateway, folder: Path) -> list[AbstractAsyncContextManager[Path]]:
    """The sockets of two sessions."""
    app = gateway.app(for_agents=True)
    return [listen_for(gateway.open_session(None, name).id, app, folder) for name in ("own", "other")]


async def test_only_its_own_session_is_there(tmp_path: Path) -> None:
    gateway = make()
    own, other = serve(gateway, tmp_path)
    key = gateway.sessions["other"].key
    async with own as socket, other:
        assert await send(socket, post(CHAT.format("own"))) == 200
        assert await send(socket, post(CHAT.format("other"))) == 404
        assert await send(socket, post("/v1/chat/completions", BODY, f"authorization: Bearer {key}")) == 403
        assert await send(socket, post("/sessions/own/../other/v1/chat/completions")) in (403, 404)
        assert await send(socket, post("/sessions", b"{}")) == 404
        assert await send(socket, post("/sessions/own/finish", b"{}")) == 404
        assert [len(session.tree.turns) for session in gateway.sessions.values()] == [1, 0]
        assert await send(socket, post("/v1/chat/completions")) == 200
        for path in (b"/", b"/sessions/own", b"/api/hello"):
            assert await send(socket, b"HEAD " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n") == 200
    assert [len(session.tree.turns) for session in gateway.sessions.values()] == [2, 0]
    assert not os.listdir(tmp_path)


async def test_a_program_can_take_all_connections_from_itself_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_socket, "MAX_CONNECTIONS", 4)
    own, other = serve(make(), tmp_path)
    async with own as socket, other as theirs:
        idle = [await asyncio.open_unix_connection(socket) for _ in range(4)]
        assert await send(socket, post(CHAT.format("own"))) == 503
        assert await send(theirs, post(CHAT.format("other"))) == 200
        for _, writer in idle:
            writer.close()
        await asyncio.sleep(0.2)
        assert await send(socket, post(CHAT.format("own"))) == 200


async def test_what_trickles_or_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(gateway_app, "MAX_BODY_BYTES", 8 << 20)
    monkeypatch.setattr(request_body.RequestBodies.__init__, "__defaults__", (1 << 20, 1 << 22, 0.5))
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    chat = b"POST /sessions/own/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
    own, _ = serve(make(), tmp_path)
    async with own as socket:
        assert await send(socket) == 408
        assert await send(socket, b"POST /sessions/own/v1/chat/comp") == 408
        assert await send(socket, chat + b"content-length: 100\r\n\r\n{") == 408
        assert await send(socket, chat + b"content-length: 8388609\r\n\r\n") == 413
        assert await send(socket, chat + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 9) == 413
        assert await send(socket, chat + b"x: y\r\n" * 9000) == 431
        assert await send(socket, post(CHAT.format("own"))) == 200
