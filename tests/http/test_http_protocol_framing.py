"""Where one request ends and the next begins on a connection, and how an answer is written to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from verl_tool.http.http_protocol import BoundedHttp

Message = dict[str, Any]
SECOND = b"GET /second HTTP/1.1\r\nHost: x\r\n\r\n"
GET = b"GET /first HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /first HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
OLD = b"POST /first HTTP/1.0\r\nHost: x\r\n"
AMBIGUOUS = {
    "two lengths": POST + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(SECOND),
    "the same length twice": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a length with a sign": POST + b"Content-Length: +2\r\n\r\n{}",
    "a length in hexadecimal": POST + b"Content-Length: 0x2\r\n\r\n{}",
    "an empty length": POST + b"Content-Length:\r\n\r\n",
    "a length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "a space before the colon": POST + b"Content-Length : 2\r\n\r\n{}",
    "a space before the colon of an encoding": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a tab before the encoding's colon": POST + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "a space before a name": GET + b" Content-Length: 0\r\n\r\n",
    "a folded encoding": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "an encoding that is not chunked": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "an encoding behind chunked": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "a vertical tab before chunked": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "quotes around chunked": POST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "a second encoding": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a bare line feed": b"POST /first HTTP/1.1\nHost: x\nContent-Length: 0\n\n",
    "a bare carriage return": GET + b"X: a\rContent-Length: 0\r\n\r\n",
    "a line feed in a value": GET + b"X: a\nTransfer-Encoding: chunked\r\n\r\n",
    "a nul in a value": GET + b"X: a\x00\r\n\r\n",
    "a nul in a name": GET + b"X\x00: a\r\n\r\n",
    "no name": GET + b": a\r\n\r\n",
    "no colon": GET + b"Content-Length\r\n\r\n",
    "a chunk size with a prefix": CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk size with a sign": CHUNKED + b"+2\r\n{}\r\n0\r\n\r\n",
    "a chunk size that overflows": CHUNKED + b"10000000000000002\r\n{}\r\n0\r\n\r\n",
    "a line feed behind a chunk's size": CHUNKED + b"2\n{}\r\n0\r\n\r\n",
    "a line feed within an extension": CHUNKED + b"2;\n{}\r\n0\r\n\r\n",
    "a line feed behind a chunk": CHUNKED + b"2\r\n{}\n0\r\n\r\n",
    "a chunk longer than its size": CHUNKED + b"2\r\n{}{}\r\n0\r\n\r\n",
    "a line feed behind the last chunk": CHUNKED + b"0\n\n",
    "chunks in HTTP 1.0": OLD + b"Connection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "http 2": b"POST /first HTTP/2.0\r\nHost: x\r\n\r\n",
    "http 1.2": b"GET /first HTTP/1.2\r\nHost: x\r\n\r\n",
    "no version": b"GET /first\r\n\r\n",
    "a word behind the version": b"GET /first HTTP/1.1 x\r\nHost: x\r\n\r\n",
    "a space in the path": b"GET /first /x HTTP/1.1\r\nHost: x\r\n\r\n",
    "a method in lower case": b"get /first HTTP/1.1\r\nHost: x\r\n\r\n",
    "another authority than the host": b"GET http://y/first HTTP/1.1\r\nHost: x\r\n\r\n",
    "another port than the host's": b"GET http://x:1/first HTTP/1.1\r\nHost: x\r\n\r\n",
    "an authority with a user": b"GET http://x@y/first HTTP/1.1\r\nHost: x\r\n\r\n",
    "a switch to HTTP 2": GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    "a length behind the body": CHUNKED + b"2\r\n{}\r\n0\r\nContent-Length: 99\r\n\r\n",
    "the last request": GET + b"Connection: close\r\n\r\n",
    "a request of HTTP 1.0": OLD + b"Connection: keep-alive\r\nContent-Length: 2\r\n\r\n{}",
}
"""What another server might end elsewhere than this one: nothing behind it is served."""
BODIES = {
    "by length": (POST + b"Content-Length: %d\r\n\r\n" % len(SECOND) + SECOND, SECOND),
    "of a GET": (GET + b"Content-Length: %d\r\n\r\n" % len(SECOND) + SECOND, SECOND),
    "in chunks": (CHUNKED + b"%x\r\n" % len(SECOND) + SECOND + b"\r\n0\r\n\r\n", SECOND),
    "with an extension": (CHUNKED + b'2;a="GET /second HTTP/1.1"\r\n{}\r\n0\r\n\r\n', b"{}"),
    "with a trailer": (CHUNKED + b"2\r\n{}\r\n0\r\nX: 1\r\nHost: y\r\n\r\n", b"{}"),
    "with a name that is nearly one": (POST + b"Content_Length: 99\r\nContent-Length: 2\r\n\r\n{}", b"{}"),
}
"""Requests, and what their bodies are."""


class Connection:
    """A connection to `BoundedHttp` without a socket; its application notes what it is asked, and answers it."""

    def __init__(self, answer: Callable[..., Any] | None = None) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.hosts: list[list[bytes]] = []
        self.writes: list[bytes] = []
        self.closed = self.half_closed = False
        config = uvicorn.Config(self._app, http=BoundedHttp, ws="none", lifespan="off", interface="asgi3")
        config.load()
        self._answer = answer or self._say_ok
        self._protocol = BoundedHttp(config, ServerState(), {})
        self._protocol.connection_made(self)  # type: ignore[arg-type]

    async def send(self, *parts: bytes) -> bytes:
        """What has been written once all that can be done is done."""
        for part in parts:
            if not self.closed:
                self._protocol.data_received(part)
            for _ in range(20):
                await asyncio.sleep(0)
        return b"".join(self.writes)

    def lose(self) -> None:
        self._protocol.connection_lost(None)

    async def _app(self, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.asked.append((scope["path"], body))
        self.hosts.append([value for name, value in scope["headers"] if name == b"host"])
        await self._answer(send)

    @staticmethod
    async def _say_ok(send: Callable[[Message], Any]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    # What a transport has.
    def write(self, data: bytes) -> None:
        assert not self.closed
        assert not self.half_closed
        self.writes.append(data)

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> None:
        return None

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.half_closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Connection]]:
    made: list[Connection] = []

    def one(answer: Callable[..., Any] | None = None) -> Connection:
        made.append(Connection(answer))
        return made[-1]

    yield one
    for connection in made:
        connection.lose()


@pytest.mark.parametrize("name", AMBIGUOUS)
@pytest.mark.parametrize("at_once", [True, False])
async def test_nothing_is_served_behind_an_ambiguous_request(
    connect: Callable[[], Connection], name: str, at_once: bool
) -> None:
    connection = connect()
    parts = [AMBIGUOUS[name] + SECOND] if at_once else [AMBIGUOUS[name], SECOND]
    answer = await connection.send(*parts)
    assert "/second" not in [path for path, _ in connection.asked]
    assert connection.closed or connection.half_closed
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("step", [1, 1000])
async def test_a_body_is_never_read_as_a_request(connect: Callable[[], Connection], name: str, step: int) -> None:
    connection, (request, body) = connect(), BODIES[name]
    data = request + SECOND
    answer = await connection.send(*(data[i : i + step] for i in range(0, len(data), step)))
    assert connection.asked == [("/first", body), ("/second", b"")]
    assert answer.count(b"HTTP/1.1 200") == 2
    assert connection.hosts == [[b"x"], [b"x"]]


async def test_the_head_and_the_body_of_an_answer_are_one_write(connect: Callable[[], Connection]) -> None:
    connection = connect()
    await connection.send(SECOND, SECOND)
    assert [data[-6:] for data in connection.writes] == [b"\r\n\r\nok"] * 2


async def test_a_head_does_not_wait_for_its_body(connect: Callable[..., Connection]) -> None:
    ready = asyncio.Event()

    async def later(send: Callable[[Message], Any]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await ready.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    connection = connect(later)
    assert (await connection.send(SECOND)).endswith(b"transfer-encoding: chunked\r\n\r\n")
    ready.set()
    assert (await connection.send(b"")).endswith(b"2\r\nok\r\n0\r\n\r\n")


async def test_an_answer_without_a_body_is_written_before_the_connection_closes(
    connect: Callable[[], Connection],
) -> None:
    connection = connect()
    answer = await connection.send(b"HEAD /first HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")
    assert connection.closed


async def test_what_a_client_waits_for_comes_before_the_refusal(connect: Callable[[], Connection]) -> None:
    connection = connect()
    expecting = POST + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = await connection.send(expecting, b"zz\r\n")
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 ")


async def test_a_bad_request_in_a_row_ends_the_row(connect: Callable[..., Connection]) -> None:
    """The first is being answered, the second waits, the third is no request."""
    ready = asyncio.Event()

    async def slowly(send: Callable[[Message], Any]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await ready.wait()
        await send({"type": "http.response.body", "body": b"ended"})

    connection = connect(slowly)
    await connection.send(GET + b"\r\n", SECOND + b"GARBAGE\r\n\r\n")
    ready.set()
    answer = await connection.send(b"")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"5\r\nbegun\r\n")
    assert connection.half_closed
    assert connection.asked == [("/first", b"")]
