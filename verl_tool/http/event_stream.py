"""Server-sent events as OpenAI's clients read them (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from verl_tool.http.disconnect import until_disconnect
from verl_tool.util.json_text import encode_json

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": heartbeat\n\n"
"""Comment that clients ignore. It keeps proxies from closing an idle connection."""


def event(value: object) -> bytes:
    """Encode an event with a JSON value. `encode_json` writes no line breaks, so it is one line."""
    return b"data: " + encode_json(value) + b"\n\n"


class EventStream(StreamingResponse):
    """A response that streams events as they are generated.

    `first` exists before the response begins, so that earlier failures can be answered with a plain error. `rest` is
    closed when the stream ends or the client disconnects. `describe_error` converts an exception from it to a status
    and the value of an event: OpenAI's clients raise errors that arrive as events. `end` is sent last.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        describe_error: Callable[[Exception], tuple[int, object]],
        *,
        end: bytes = DONE,
    ) -> None:
        # Without these headers, reverse proxies buffer streams.
        super().__init__(self._all(first), headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._rest = rest
        self._describe_error = describe_error
        self._end = end
        self.bytes_out = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events. Raises Disconnected if the client disconnects before the end."""

        async def counted(message: Message) -> None:
            self.bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            await until_disconnect(self.stream_response(counted), receive)
        finally:
            await self._rest.aclose()

    async def _all(self, first: bytes) -> AsyncIterator[bytes]:
        try:
            yield first
            async for part in self._rest:
                yield part
        except Exception as error:  # noqa: BLE001  # sent to the client
            self.status_code, value = self._describe_error(error)
            yield event(value)
        yield self._end
