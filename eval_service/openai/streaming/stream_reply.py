"""A reply that is sent while it is made."""

from __future__ import annotations

import time
from dataclasses import dataclass

from eval_service.metrics import ServiceMetrics
from eval_service.openai.errors import ApiError
from eval_service.openai.streaming import sse
from verl_tool.servers.api.http import Send


@dataclass(frozen=True)
class Sent:
    """What went over the wire for one request."""

    status: int
    bytes_out: int = 0
    bytes_in: int = 0


class StreamReply:
    """Events to one client. The head goes out with the first of them, so that what fails before is a plain error; a
    heartbeat is one of them."""

    def __init__(self, send: Send, metrics: ServiceMetrics) -> None:
        self._send = send
        self._metrics = metrics
        self._made = time.perf_counter()
        self.begun = False
        self._told_first = False
        self.bytes_out = 0

    async def write(self, events: bytes) -> None:
        """Send some events; waits for a client that reads slowly."""
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
        if not self._told_first and events != sse.HEARTBEAT:
            self._told_first = True
            self._metrics.first_chunk(time.perf_counter() - self._made)
        self.bytes_out += len(events)
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """Send the mark of the end."""
        await self.write(sse.DONE)
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ApiError) -> None:
        """The rest will not come; OpenAI's clients raise an error that arrives as an event."""
        await self.write(sse.event(error.body()))
        await self.end()
