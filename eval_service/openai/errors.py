"""Errors as OpenAI's clients know them."""

from __future__ import annotations

from verl_tool.errors import VerlToolError
from verl_tool.json_text import encode_json
from verl_tool.protocol import Fault, FaultKind
from verl_tool.servers.api.http import Headers, HttpError, Reply

RETRY_LATER: Headers = ((b"retry-after", b"1"),)
"""Seconds; goes with every 503."""

_STATUS_OF_FAULT = {FaultKind.TIMEOUT: 504, FaultKind.BAD_REQUEST: 400}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class TemplateRefusedError(VerlToolError, ValueError):
    """The chat template cannot render these messages."""


class ApiError(VerlToolError):
    """A request that is not answered. `code` is a word for programs, `param` the field that is to blame.

    OpenAI's shape: https://platform.openai.com/docs/guides/error-codes
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, headers: Headers = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> dict[str, dict[str, str | None]]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def reply(self) -> Reply:
        return Reply(encode_json(self.body()), self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client's own mistake."""
    return ApiError(400, message, code=code, param=param)


def overloaded(message: str, code: str = "overloaded") -> ApiError:
    """Nothing was run; the same request may be sent again soon."""
    return ApiError(503, message, code=code, headers=RETRY_LATER)


def from_http(error: HttpError) -> ApiError:
    """An error of the HTTP layer in OpenAI's shape."""
    return ApiError(error.status, error.message, code=error.type, param=error.field, headers=error.headers)


def from_fault(fault: Fault) -> ApiError:
    """A fault of the tools: the conversation has no answer."""
    status = _STATUS_OF_FAULT.get(fault.kind, 503)
    message = f"a tool call failed, not by the model's doing ({fault.kind.value}): {fault.message}"
    return ApiError(status, message, code=f"tool_{fault.kind.value}", headers=RETRY_LATER if status == 503 else ())
