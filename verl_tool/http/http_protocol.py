"""Extend uvicorn's HTTP protocol with limits on what a client can send before any application sees it.

uvicorn waits forever for the rest of a request's head and does not limit its size, and no API key is needed to exploit
that. Requests rejected here get a JSON error like those of the applications.
"""

from __future__ import annotations

import asyncio
import resource
from typing import cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from verl_tool.http.messages import BODY_IS_HERE
from verl_tool.util.json_text import encode_json

HEAD_SECONDS = 10.0
"""Deadline for a request's head, from the start of the connection or the first byte of a further request."""
MAX_HEAD_BYTES = 32 << 10
"""Maximum size of request line and headers together."""
MAX_HEADERS = 128
"""Maximum number of headers of one request."""
LINGER_SECONDS = 2.0
"""How long a connection stays open after an answer to a request that was not read completely, so that a client that is
still sending can read the answer."""
_OPEN_FILES_HARD_LIMIT = 16_384

_VERSIONS = ("1.1", "1.0")
_IDLE, _IN_HEAD, _IN_BODY, _ENDED = range(4)


def max_connections() -> int:
    """Return the maximum number of connections of one server: half of the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    maximum = _OPEN_FILES_HARD_LIMIT if soft == resource.RLIM_INFINITY else min(soft, _OPEN_FILES_HARD_LIMIT)
    return max(64, maximum // 2)


class BoundedHttp(HttpToolsProtocol):
    """One connection. Without a WebSocket protocol in uvicorn's configuration, an upgrade request is answered like any
    other."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._phase = _IDLE
        self._head_bytes = 0
        self._gentle = _GentleTransport(self)
        self._timer = self.loop.call_later(HEAD_SECONDS, self._head_too_slow)
        maximum = self.max_connections()
        if len(self.connections) > maximum:
            self._reject(503, "overloaded", f"more than {maximum} connections are open; try it again later")

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    @classmethod
    def max_connections(cls) -> int:
        """Maximum number of connections of this server."""
        return max_connections()

    def data_received(self, data: bytes) -> None:
        if self._phase == _ENDED:
            return
        # Within a body, this counts the bytes since its last part: chunk sizes and trailers.
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and self._phase in (_IN_HEAD, _IN_BODY):
            self._head_too_large()
        elif self._phase == _IN_HEAD or (self._phase == _IDLE and not self._is_answering()):
            self._watch_head()

    def on_message_begin(self) -> None:
        if self._phase != _ENDED:
            self._phase = _IN_HEAD
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._phase == _ENDED:
            return
        self._timer.cancel()
        # The last bytes may include a part of the body.
        may_be_large = self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS
        if may_be_large and (len(self.headers) > MAX_HEADERS or self._size_of_head() > MAX_HEAD_BYTES):
            self._head_too_large()
            return
        if self.parser.get_http_version() not in _VERSIONS:
            self._reject(505, "bad_version", "this server speaks HTTP/1.1; send the request in that version")
            return
        if not self.url.startswith(b"/") and self._names_two_hosts():
            self._reject(
                400, "bad_request", "the target and the header 'host' name different hosts; send the path alone"
            )
            return
        self._phase = _IN_BODY
        self._head_bytes = 0
        self._body_is_here = [False]
        self.scope[BODY_IS_HERE] = self._body_is_here  # type: ignore[literal-required]
        super().on_headers_complete()
        if self.ws_protocol_class is not None and self._should_upgrade():
            return
        # Trailers after the body would be added to the headers, but are not used.
        self.headers = []
        self.cycle.transport = cast(asyncio.Transport, self._gentle)

    def on_body(self, body: bytes) -> None:
        if self._phase == _IN_BODY:
            self._head_bytes = 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._phase == _IN_BODY:
            self._phase = _IDLE
            self._head_bytes = 0
            self._body_is_here[0] = True
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase == _IN_BODY and self.cycle.response_complete:
            # The rest of the body, which may never end, will not be read.
            self.close_gently()

    def close_gently(self) -> None:
        """Close the connection. If the client is still sending, first give it time to read the answer.

        Closing a connection with unread bytes resets it, and the answer may be lost.
        """
        if self.transport.is_closing():
            return
        self._gentle.flush()
        if self._phase == _IDLE:
            self.transport.close()
        elif self._phase != _ENDED:
            self._linger()

    def send_400_response(self, msg: str) -> None:
        if self._phase == _ENDED:
            return
        self._reject(400, "bad_request", "this is not a well-formed HTTP request; see RFC 9112")

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to the WebSocket protocol, which counts in the limit of connections."""
        self._phase = _ENDED
        self._timer.cancel()
        super().handle_websocket_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """Answer the request like any other, then close, since data after it would be in another protocol."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _names_two_hosts(self) -> bool:
        """Return whether the target and ``Host`` differ. The target's host counts (RFC 9112, 3.2.2), but later checks
        use ``Host``."""
        authority = self.url.partition(b"//")[2].partition(b"/")[0].lower()
        return any(name == b"host" and value.lower() != authority for name, value in self.headers)

    def _size_of_head(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_head(self) -> None:
        """Start the deadline of the request's head. uvicorn's own timer stops at the first byte."""
        if self._timer.cancelled():
            self._timer = self.loop.call_later(HEAD_SECONDS, self._head_too_slow)

    def _head_too_slow(self) -> None:
        if self._phase == _IN_HEAD or (self._phase == _IDLE and not self._is_answering()):
            self._reject(408, "head_too_slow", f"the request's head did not come within {HEAD_SECONDS:g} s")

    def _head_too_large(self) -> None:
        message = f"the request's head is larger than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers; send fewer"
        self._reject(431, "head_too_large", message)

    def _reject(self, status: int, kind: str, message: str) -> None:
        """Answer in place of the application, unless its answer has begun, and end the connection."""
        if self.transport.is_closing():
            return
        self._gentle.flush()
        if self._is_answering():
            # The application waits for an incomplete body, or is about to answer an earlier request.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # If requests are queued, the answer to an earlier one may have begun.
        if not self.pipeline and (not self._is_answering() or not self.cycle.response_started):
            self.transport.write(_refusal(status, kind, message))
        self._linger()

    def _linger(self) -> None:
        self._phase = _ENDED
        self._gentle.end()
        # Queued requests can no longer be answered.
        self.pipeline.clear()
        self._timer.cancel()
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)


class _GentleTransport:
    """Wraps the connection's transport for a request, and closes it gently.

    The head of an answer is sent together with data written in the same iteration of the event loop: one system call
    and one packet instead of two.
    """

    def __init__(self, protocol: BoundedHttp) -> None:
        self._loop = protocol.loop
        self._transport = protocol.transport
        self._first = b""
        self._ended = False
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.close_gently

    def write(self, data: bytes) -> None:
        """Write `data`, now or in the next iteration of the event loop."""
        if self._ended:
            return
        if self._first:
            first, self._first = self._first, b""
            self._transport.writelines((first, data))
        else:
            self._first = data
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write pending data now."""
        first, self._first = self._first, b""
        if first and not self._transport.is_closing():
            self._transport.write(first)

    def end(self) -> None:
        """Discard all further data."""
        self._ended = True


def error_of_any_kind(kind: str, message: str) -> dict[str, dict[str, str | None]]:
    """Return an error in the forms of the tool server and of OpenAI at once, since the application is not known
    here."""
    return {"error": {"message": message, "type": kind, "field": None, "param": None, "code": kind}}


def _refusal(status: int, kind: str, message: str) -> bytes:
    body = encode_json(error_of_any_kind(kind, message))
    further = b"retry-after: 1\r\n" if status == 503 else b""
    return b"%scontent-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n%s" % (
        STATUS_LINE[status],
        len(body),
        further,
        body,
    )
