"""What an API has to know: how to read a request, and how to write an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from verl_tool.errors import VerlToolError
from verl_tool.gateway.conversation import AgentRequest, MessageList, ModelAnswer


class RequestError(VerlToolError):
    """A request that the gateway does not answer: its message goes to the agent, with status 400."""


class Dialect(Protocol):
    """One API."""

    name: str
    path: str
    """Of its requests, such as ``/v1/messages``."""
    history_field: str
    """In which field of a request the conversation is, as a list of items. What an item means depends on the items
    before it and on ``tools`` alone."""

    def parse_request(
        self, body: Mapping[str, Any], headers: Mapping[str, str], found: MessageList | None = None
    ) -> AgentRequest:
        """Read a request. `headers` have names in lower case. found: what was read of the beginning of the history,
        which `body` leaves out; the rest is added to it. Raises RequestError that names the field."""
        ...

    def render_answer(self, answer: ModelAnswer, request: AgentRequest) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def stream_answer(self, answer: ModelAnswer, request: AgentRequest) -> Iterator[bytes]:
        """The same as server-sent events, the last one included."""
        ...

    def render_error(self, status: int, message: str) -> dict[str, Any]:
        """The body of an error."""
        ...

    def render_error_event(self, status: int, message: str) -> bytes:
        """The event of an error that ends a stream."""
        ...

    ping: bytes
    """An event, or a comment, that clients pass over: it keeps a stream alive."""
