"""Whatever is sent to the tool server, it answers, says what was wrong, and goes on."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hostile import ask, check_answer, odd_bodies, odd_headers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_run_code import CodePuppet
from toy_tools import Ledger

from verl_tool.http.host_check import HostCheck
from verl_tool.http.request_body import RequestBodies
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.replica.asgi_app import ToolServerApp

OBSERVE = {
    "trajectory_ids": ["a"], "actions": ["<ledger>x</ledger>"], "extra_fields": [{"k": 1}],
    "finish": [False], "is_last_step": [False], "steps": [0], "tool_name": [None],
}  # fmt: skip
RUN = {
    "code": "1", "language": "python", "stdin": "", "compile_timeout": 1, "run_timeout": 1, "memory_limit_MB": 64,
    "files": {"a": "aGk="}, "fetch_files": ["a"],
}  # fmt: skip
BODIES = odd_bodies([OBSERVE, RUN])
PATHS = ("/get_observation", "/run_code", "/health", "/tools", "/metrics", "/replicas", "/", "/a\nb", "/" + "x" * 9000)
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "CONNECT", "BREW", "x\ny" * 50)


class Server:
    """One app in an event loop of the module's own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.toolset = ToolSet([Ledger(), CodePuppet()])
        self.loop.run_until_complete(self.toolset.start())
        self.app = ToolServerApp(self.toolset, peer_key="k", bodies=RequestBodies(grace_seconds=1.0))

    def ask(self, *request: Any, **options: Any) -> tuple[int, dict[bytes, bytes], bytes]:
        return self.loop.run_until_complete(ask(self.app, *request, **options))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.loop.run_until_complete(running.toolset.close())
    running.loop.close()


@settings(max_examples=150)
@given(body=BODIES, headers=odd_headers(), parts=st.integers(1, 3))
def test_any_body_is_answered(server: Server, body: bytes, headers: list[tuple[bytes, bytes]], parts: int) -> None:
    for path in ("/get_observation", "/run_code") if b'"code"' in body else ("/get_observation",):
        answer = server.ask("POST", path, body, headers, parts=parts)
        if answer[0] != 400 or b'"observations"' not in answer[2]:
            check_answer(*answer)
    assert server.ask("GET", "/health")[0] == 200
    assert server.app.bodies.held == 0


@settings(max_examples=60)
@given(method=st.sampled_from(METHODS), path=st.sampled_from(PATHS), headers=odd_headers())
def test_any_method_and_path_is_answered(
    server: Server, method: str, path: str, headers: list[tuple[bytes, bytes]]
) -> None:
    check_answer(*server.ask(method, path, b"{}", headers))


@pytest.mark.parametrize(
    "name",
    ["host", "origin", "authorization", "content-length", "content-type", "content-encoding", "x-verl-tool-server",
     "x-verl-tool-replica", "x-verl-tool-forwarded", "x-verl-tool-peer-key"],
)  # fmt: skip
def test_of_two_headers_none_is_believed(server: Server, name: str) -> None:
    for values in ((b"1", b"2"), (b"1", b"1")):
        status, _, body = server.ask("GET", "/health", headers=[(name.encode(), value) for value in values])
        assert status == 400
        assert json.loads(body)["error"]["field"] == name
    assert server.ask("GET", "/health", headers=[(b"accept", b"a"), (b"accept", b"b")])[0] == 200


async def test_a_websocket_is_closed() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await ToolServerApp(ToolSet([Ledger()]))({"type": "websocket", "path": "/", "headers": []}, receive, send)
    assert sent[0]["type"] == "websocket.close"


class TestHosts:
    """`HostCheck` at 127.0.0.1:5000, asked over a listener at port 7000 too."""

    @staticmethod
    def status(
        host: bytes | None,
        origin: bytes | None = None,
        allowed: tuple[str, ...] = (),
        front: str = "127.0.0.1",
        has_key: bool = False,
    ):
        app = ToolServerApp(ToolSet([Ledger()]), host_check=HostCheck(front, 5000, allowed, has_key=has_key))
        headers = [(name, value) for name, value in ((b"host", host), (b"origin", origin)) if value is not None]

        async def within(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "server": ("127.0.0.1", 7000)}, receive, send)

        return asyncio.run(ask(within, "GET", "/tools", headers=headers))[0]

    @pytest.mark.parametrize(
        "host",
        [b"127.0.0.1:5000", b"localhost:5000", b"LOCALHOST:5000", b"localhost.:5000", b"[::1]:5000", b"127.9.9.9:5000",
         b"127.0.0.1:7000"],
    )  # fmt: skip
    def test_own_names_are_served(self, host: bytes) -> None:
        assert self.status(host) == 200
        assert self.status(host, b"http://" + host) == 200

    @pytest.mark.parametrize(
        "host",
        [b"evil.example:5000", b"localhost.evil.example:5000", b"127.0.0.1.evil.example:5000", b"localhost:6000",
         b"localhost", b"x@localhost:5000", b"localhost:5000/x", b"[::1", b"", b"\xff", b"10.0.0.1:5000",
         b"localhost:99999", b"127.1:5000@x"],
    )  # fmt: skip
    def test_other_names_are_refused(self, host: bytes) -> None:
        assert self.status(host) == 403

    @pytest.mark.parametrize(
        "origin", [b"http://evil.example", b"null", b"", b"http://localhost:3000", b"file://", b"\xff", b"http://[::1"]
    )
    def test_other_pages_are_refused(self, origin: bytes) -> None:
        assert self.status(b"localhost:5000", origin) == 403

    def test_without_a_host_it_is_a_bad_request(self) -> None:
        assert self.status(None) == 400

    def test_more_names_can_be_allowed(self) -> None:
        allowed = ("box.example", "other.example:99")
        assert self.status(b"box.example:1234", allowed=allowed) == 200
        assert self.status(b"box.example:1234", b"https://box.example", allowed=allowed) == 200
        assert self.status(b"other.example:99", allowed=allowed) == 200
        assert self.status(b"other.example:98", allowed=allowed) == 403
        # 7000 is the server's second port.
        assert self.status(b"third.example:7000", allowed=("third.example:5000",)) == 200
        assert self.status(b"third.example:7000", allowed=("third.example:5001",)) == 403

    @pytest.mark.parametrize(
        "host", [b"10.0.0.1:80", b"[fd00::1]:5000", b"localhost:99", socket.gethostname().encode()]
    )
    def test_an_open_server_is_called_by_addresses_and_its_own_names(self, host: bytes) -> None:
        assert self.status(host, front="0.0.0.0") == 200

    @pytest.mark.parametrize("host", [b"any.example", b"10.0.0.1.any.example", b"0x7f000001", b"127.1"])
    def test_an_open_server_without_a_key_refuses_other_names(self, host: bytes) -> None:
        """A page may point a name of its own at any address of a network."""
        assert self.status(host, front="0.0.0.0") == 403
        assert self.status(host, front="0.0.0.0", has_key=True) == 200
        assert self.status(host, front="0.0.0.0", allowed=(host.decode(),)) == 200
        assert self.status(host, front="0.0.0.0", allowed=("box.example",), has_key=True) == 403
        assert self.status(host, front="127.0.0.1", has_key=True) == 403
