"""Errors as OpenAI's clients know them."""

from __future__ import annotations

from verl_tool.errors import VerlToolError
from verl_tool.http.messages import RETRY_AFTER, HttpError
from verl_tool.protocol import Fault, FaultKind

_STATUS_OF_FAULT = {FaultKind.TIMEOUT: 504, FaultKind.BAD_REQUEST: 400}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class TemplateRejectedError(VerlToolError, ValueError):
    """The chat template cannot render these messages."""


def openai_error(error: HttpError) -> dict[str, dict[str, str | None]]:
    """``{"error": {"message", "type", "param", "code"}}``: https://platform.openai.com/docs/guides/error-codes"""
    default = "invalid_request_error" if error.status < 500 else "server_error"
    kind = _TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.type}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> HttpError:
    return HttpError(400, code, message, param)


def overloaded(message: str, code: str = "overloaded") -> HttpError:
    """Nothing was run; the same request may be sent again soon."""
    return HttpError(503, code, message, headers=RETRY_AFTER)


def from_fault(fault: Fault) -> HttpError:
    """A fault of the tools: the conversation has no answer."""
    status = _STATUS_OF_FAULT.get(fault.kind, 503)
    message = f"a tool call failed, not by the model's doing ({fault.kind.value}): {fault.message}"
    return HttpError(status, f"tool_{fault.kind.value}", message, headers=RETRY_AFTER if status == 503 else None)
