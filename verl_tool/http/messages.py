"""What is said over HTTP by all applications of this project, on top of Starlette."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from verl_tool.errors import VerlToolError
from verl_tool.util.json_text import encode_json

HeaderMap = Mapping[bytes, bytes]
"""A request's headers by their names, in lower case."""

BODY_IS_HERE = "verl_tool.body_is_here"
"""Entry of a scope of `http_protocol`: a list of one bool, true as soon as the whole body has come. A list, since Serve
pickles scopes."""
JSON = "application/json"
RETRY_AFTER = {"retry-after": "1"}
"""Header of every 503, in seconds."""

_ONCE = (b"host", b"origin", b"authorization", b"content-length", b"content-type", b"content-encoding")
_OUR_NAMES = b"x-verl-tool-"
"""What the names of this project's own headers begin with."""


class HttpError(VerlToolError):
    """A request that is refused. `type` is a word for programs, `message` names what is wrong and the mend."""

    def __init__(
        self,
        status: int,
        type: str | None,
        message: str,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.message = message
        self.field = field
        self.headers = headers


class Disconnected(Exception):
    """The client has left; nobody reads an answer."""


class JsonResponse(Response):
    """An answer in JSON. Its content is a value, or bytes that are JSON already."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else encode_json(content)


def error_response(error: HttpError) -> JsonResponse:
    """``{"error": {"message", "type", "field"}}``."""
    description = {"message": error.message, "type": error.type, "field": error.field}
    return JsonResponse({"error": description}, error.status, error.headers)


def headers_of(scope: Scope) -> HeaderMap:
    """All headers of a request; of one that is repeated, the last.

    Raises HttpError 400 if a header on which an answer depends is repeated: who is before this server may have read the
    other one.
    """
    pairs = scope["headers"]
    headers = dict(pairs)
    if len(headers) != len(pairs):
        _reject_repeated([name for name, _ in pairs])
    return headers


def path_of(scope: Scope) -> str:
    """The path below the place where the app is mounted, without a closing slash."""
    path, root = scope["path"], scope.get("root_path", "")
    if root and path.startswith(root):
        path = path[len(root) :]
    return path.rstrip("/") or "/"


def _reject_repeated(names: Sequence[bytes]) -> None:
    for name in names:
        if (name in _ONCE or name.startswith(_OUR_NAMES)) and names.count(name) > 1:
            words = name[:80].decode("latin-1")
            raise HttpError(400, "bad_request", f"the header {words!r} is there twice; send it once", words)
