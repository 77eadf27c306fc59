"""Answers that are sent while they are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from verl_tool.http import disconnect
from verl_tool.http.event_stream import DONE, EventStream, event
from verl_tool.http.messages import Disconnected


class Client:
    """Somebody who reads a stream, and may leave."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Events:
    """A source of events that notes its end."""

    def __init__(self) -> None:
        self.closed = False

    async def make(
        self, *parts: bytes, error: Exception | None = None, endless: bool = False
    ) -> AsyncGenerator[bytes, None]:
        try:
            for part in parts:
                yield part
            if error is not None:
                raise error
            if endless:
                await asyncio.Event().wait()
        finally:
            # What a source frees may take a while.
            await asyncio.sleep(0)
            self.closed = True


def told(error: Exception) -> tuple[int, object]:
    return 503, {"error": str(error)}


async def test_all_events_and_the_end_are_sent() -> None:
    client, events = Client(), Events()
    stream = EventStream(b"a\n\n", events.make(b"b\n\n", b"c\n\n"), told)
    await stream({"type": "http"}, client.receive, client.send)
    assert client.body == b"a\n\nb\n\nc\n\n" + DONE
    assert dict(client.sent[0]["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert b"content-length" not in dict(client.sent[0]["headers"])
    assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert stream.bytes_out == len(client.body)
    assert events.closed


async def test_what_ends_a_stream_is_told_as_an_event() -> None:
    client, events = Client(), Events()
    stream = EventStream(b"a\n\n", events.make(error=ValueError("no more")), told)
    await stream({"type": "http"}, client.receive, client.send)
    assert client.body == b"a\n\n" + event({"error": "no more"}) + DONE
    assert client.sent[0]["status"] == 200
    assert stream.status_code == 503
    assert events.closed


@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_that_leaves_ends_the_source(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the stream waits for the source or for the client."""
    monkeypatch.setattr(disconnect, "_WATCH_AFTER_SECONDS", 0.01)
    client, events = Client(), Events()
    rest = events.make(b"a\n\n", b"b\n\n", endless=True)
    stream = EventStream(await anext(rest), rest, told)
    if not reads:
        client.reads.clear()
    sending = asyncio.create_task(stream({"type": "http"}, client.receive, client.send))
    await asyncio.sleep(0.05)
    client.left.set()
    with pytest.raises(Disconnected):
        await asyncio.wait_for(sending, 10)
    assert client.body == (b"a\n\nb\n\n" if reads else b"")
    assert events.closed
