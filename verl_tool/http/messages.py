"""HTTP headers, errors and responses that all applications of this project share, on top of Starlette."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from verl_tool.errors import VerlToolError
from verl_tool.util.json_text import encode_json

HeaderMap = Mapping[bytes, bytes]
"""A request's headers by their lower-case names."""

BODY_IS_HERE = "verl_tool.body_is_here"
"""Entry of a scope set by `http_protocol`: a list with one bool, which becomes true when the whole body has arrived. It
is a list, since Serve pickles scopes."""
JSON = "application/json"
RETRY_AFTER = {"retry-after": "1"}
"""Header of every 503, in seconds."""

_ONCE = (b"host", b"origin", b"authorization", b"content-length", b"content-type", b"content-encoding")
_OUR_NAMES = b"x-verl-tool-"
"""Prefix of this project's headers."""


class HttpError(VerlToolError):
    """A request is rejected. `type` is a code for programs; `message` names the problem and the remedy."""

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
    """The client has disconnected, so there is no need to answer."""


class JsonResponse(Response):
    """A JSON response. Its content is a value, or bytes that are already JSON."""

    media_type = JSON

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else encode_json(content)


def error_response(error: HttpError) -> JsonResponse:
    """Return an error as ``{"error": {"message", "type", "field"}}``."""
    content = {"message": error.message, "type": error.type, "field": error.field}
    return JsonResponse({"error": content}, error.status, error.headers)


def headers_of(scope: Scope) -> HeaderMap:
    """Return all headers of a request. If a header is repeated, the last value counts.

    Raises HttpError 400 if a header that affects the answer is repeated, since a proxy may have used the other value.
    """
    pairs = scope["headers"]
    headers = dict(pairs)
    if len(headers) != len(pairs):
        _reject_repeated([name for name, _ in pairs])
    return headers


def path_of(scope: Scope) -> str:
    """Return the path below the mount point of the app, without a trailing slash."""
    path, root = scope["path"], scope.get("root_path", "")
    if root and path.startswith(root):
        path = path[len(root) :]
    return path.rstrip("/") or "/"


def _reject_repeated(names: Sequence[bytes]) -> None:
    for name in names:
        if (name in _ONCE or name.startswith(_OUR_NAMES)) and names.count(name) > 1:
            words = name[:80].decode("latin-1")
            raise HttpError(400, "bad_request", f"the header {words!r} is there twice; send it once", words)
