"""Read the bodies of requests, with limits on their size, on their time, and on the bytes held at a time."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Message, Receive, Scope

from verl_tool.errors import ConfigError
from verl_tool.http.messages import BODY_IS_HERE, JSON, RETRY_AFTER, Disconnected, HeaderMap, HttpError
from verl_tool.util.deadline import Deadline

MAX_BODY_BYTES = 4 << 20
"""Maximum size of a request's body: twice a batch of 1024 trajectories at 2 KiB. Parsing a larger body in a thread
would delay the event loop for too long."""
MAX_MEDIA_BODY_BYTES = 48 << 20
"""Maximum size of bodies that may contain images and audio: `ContentLimits.media_bytes` as data URIs. Long strings are
parsed fast, and the number of values in a body is limited too (`verl_tool.util.json_text`)."""
MAX_HELD_BYTES = 256 << 20
"""Maximum total size of the bodies that one process holds at a time."""
GRACE_SECONDS = 10.0
"""Time in which a body may arrive at any rate."""
MIN_BYTES_PER_SECOND = 256 << 10
"""Minimum rate at which a body must arrive after that time."""
SMALL_BYTES = 1 << 20
"""Half of `MAX_HELD_BYTES` is reserved for bodies up to this size, so that large bodies do not block small ones."""

_JSON = JSON.encode()
_JSON_LIKE = (_JSON, b"application/octet-stream", b"text/plain", b"application/x-www-form-urlencoded")
"""Content types with which clients send JSON. `curl -d` sends the last one."""
_AS_IT_IS = b"identity"


class RequestBodies:
    """Reads bodies and counts the bytes that are held. All HTTP servers of a process share one instance.

    A body counts until `release` is called.
    """

    def __init__(
        self,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_held_bytes: int = MAX_HELD_BYTES,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        if not 1 <= max_body_bytes <= max_held_bytes // 2 or not grace_seconds > 0:
            raise ConfigError(
                f"max_body_bytes is {max_body_bytes}, max_held_bytes {max_held_bytes} and grace_seconds "
                f"{grace_seconds}; all must be above 0, the second at least twice the first"
            )
        self.max_body_bytes = max_body_bytes
        self.held = 0
        """Bytes held now."""
        self._max_held = max_held_bytes
        self._grace = grace_seconds

    async def read(self, scope: Scope, headers: HeaderMap, receive: Receive) -> bytes:
        """Read the whole body. `headers` are those of `scope` (`headers_of`).

        Raises HttpError 413 as soon as the body is too large, 408 if it arrives too slowly, 415 if it is encoded, and
        503 if too many bytes are held. Raises Disconnected if the client disconnects.
        """
        reject_encoding(headers)
        is_here = scope.get(BODY_IS_HERE)
        if is_here and is_here[0]:
            # Most bodies arrive together with the head and need no deadline.
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
        else:
            self._reject_by_length(headers)
            message = await self._next(receive, time.monotonic(), 0)
        body: bytes = message.get("body", b"")
        self._take(len(body), len(body))
        if not message.get("more_body"):
            return body
        return await self._rest(receive, body)

    def release(self, size: int) -> None:
        """Release a body of `size` bytes."""
        self.held -= size

    async def _rest(self, receive: Receive, first: bytes) -> bytes:
        began, parts, size = time.monotonic(), [first], len(first)
        try:
            more = True
            while more:
                message = await self._next(receive, began, size)
                part: bytes = message.get("body", b"")
                self._take(len(part), size + len(part))
                size += len(part)
                parts.append(part)
                more = bool(message.get("more_body"))
        except BaseException:
            self.release(size)
            raise
        return b"".join(parts)

    def _reject_by_length(self, headers: HeaderMap) -> None:
        """Reject a body by its ``Content-Length`` before it is read."""
        length = headers.get(b"content-length")
        if length is None:
            return
        if not length.isdigit():
            raise HttpError(400, "bad_request", "'content-length' is not a number of bytes", "content-length")
        # Never convert a text of thousands of digits to a number.
        if len(length) > 18 or int(length) > self.max_body_bytes:
            raise self._too_large()
        if not self._has_capacity(int(length), int(length)):
            raise self._full()

    async def _next(self, receive: Receive, began: float, size: int) -> Message:
        """Receive the next part of a body, of which `size` bytes have arrived since `began`."""
        allowed = self._grace + size / MIN_BYTES_PER_SECOND
        try:
            with Deadline(began + allowed - time.monotonic()):
                message = await receive()
        except asyncio.TimeoutError:
            words = f"the body did not come in time: {size} bytes in {allowed:.0f} s; send it at once, or in parts"
            raise HttpError(408, "body_too_slow", words) from None
        if message["type"] == "http.disconnect":
            raise Disconnected
        return message

    def _take(self, more: int, size: int) -> None:
        """Count `more` bytes of a body that now has `size` bytes."""
        if size > self.max_body_bytes:
            raise self._too_large()
        if not self._has_capacity(more, size):
            raise self._full()
        self.held += more

    def _has_capacity(self, more: int, size: int) -> bool:
        return self.held + more <= (self._max_held if size <= SMALL_BYTES else self._max_held // 2)

    def _too_large(self) -> HttpError:
        message = f"the body is larger than {self.max_body_bytes} bytes; send less in one request"
        return HttpError(413, "body_too_large", message)

    def _full(self) -> HttpError:
        message = (
            f"the bodies of other requests fill this server ({self.held} of {self._max_held} bytes); send it later"
        )
        return HttpError(503, "overloaded", message, headers=RETRY_AFTER)


def reject_encoding(headers: HeaderMap) -> None:
    """Raise HttpError 415 for a body that is compressed, a form, or not in UTF-8."""
    kind, encoding = headers.get(b"content-type", _JSON), headers.get(b"content-encoding", _AS_IT_IS)
    if kind != _JSON and not _is_json_like(kind):
        words = kind[:80].decode("latin-1")
        message = f"'content-type' is {words!r}; send 'application/json', which is always UTF-8"
        raise HttpError(415, "unsupported_media_type", message, "content-type")
    if encoding.lower() != _AS_IT_IS:
        words = encoding[:80].decode("latin-1")
        message = f"'content-encoding' is {words!r}; send the body as it is, and leave this header out"
        raise HttpError(415, "unsupported_encoding", message, "content-encoding")


def _is_json_like(content_type: bytes) -> bool:
    kind, _, rest = content_type.lower().partition(b";")
    charset = rest.partition(b"charset=")[2].strip(b' "')
    return kind.strip() in _JSON_LIKE and charset in (b"", b"utf-8", b"utf8", b"us-ascii")
