"""The little of HTTP that the server needs on top of ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from verl_tool.json_text import encode_json

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]
HeaderMap = Mapping[bytes, bytes]
"""A request's headers by their names, in lower case."""

BODY_IS_HERE = "verl_tool.body_is_here"
"""Entry of a scope of `http_protocol`: a list of one bool, true as soon as the whole body has come. A list, since Serve
pickles scopes."""
JSON = b"application/json"
PROMETHEUS_TEXT = b"text/plain; version=0.0.4; charset=utf-8"

_ONCE = (b"host", b"origin", b"authorization", b"content-length", b"content-type", b"content-encoding")
_OUR_NAMES = b"x-verl-tool-"
"""What the names of this project's own headers begin with."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, whole."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: Headers = ()


class HttpError(Exception):
    """A request that is refused. `type` is a word for programs, `message` names what is wrong and the mend."""

    def __init__(self, status: int, type: str, message: str, field: str | None = None, headers: Headers = ()) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.message = message
        self.field = field
        self.headers = headers

    def reply(self) -> Reply:
        """``{"error": {"message", "type", "field"}}``."""
        error = {"message": self.message, "type": self.type, "field": self.field}
        return Reply(encode_json({"error": error}), self.status, headers=self.headers)


class Disconnected(Exception):
    """The client has left; nobody reads an answer."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The value of the first header of that name (in lower case)."""
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


def headers_of(scope: Scope) -> HeaderMap:
    """All headers of a request; of one that is repeated, the last.

    Raises HttpError 400 if a header on which an answer depends is repeated: who is before this server may have read the
    other one.
    """
    pairs = scope["headers"]
    headers = dict(pairs)
    if len(headers) != len(pairs):
        _refuse_repeated([name for name, _ in pairs])
    return headers


def path_of(scope: Scope) -> str:
    """The path below the place where the app is mounted, without a closing slash."""
    path, root = scope["path"], scope.get("root_path", "")
    if root and path.startswith(root):
        path = path[len(root) :]
    return path.rstrip("/") or "/"


async def send_reply(send: Send, reply: Reply, further: Headers = ()) -> None:
    """Send it, with `further` headers."""
    headers = [
        (b"content-type", reply.content_type),
        (b"content-length", str(len(reply.body)).encode()),
        *further,
        *reply.headers,
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


async def answer_lifespan(receive: Receive, send: Send) -> None:
    """Take part in the server's start and stop; nothing is done at either."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def refuse_websocket(receive: Receive, send: Send) -> None:
    """Close it before it is accepted, which the client sees as HTTP 403."""
    await receive()
    await send({"type": "websocket.close", "code": 1003, "reason": "this server speaks HTTP only"})


def _refuse_repeated(names: list[bytes]) -> None:
    for name in names:
        if (name in _ONCE or name.startswith(_OUR_NAMES)) and names.count(name) > 1:
            words = name[:80].decode("latin-1")
            raise HttpError(400, "bad_request", f"the header {words!r} is there twice; send it once", words)
