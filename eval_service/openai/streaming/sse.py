"""Server-sent events as OpenAI's clients read them (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

from verl_tool.json_text import encode_json

CONTENT_TYPE = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": heartbeat\n\n"
"""A comment, which clients pass over: it keeps proxies from closing a connection on which nothing moves."""
HEADERS = (
    (b"content-type", CONTENT_TYPE),
    (b"cache-control", b"no-cache"),
    # Reverse proxies hold streams back otherwise.
    (b"x-accel-buffering", b"no"),
)


def event(value: object) -> bytes:
    """One event with a JSON value. JSON of ours holds no line break, so it is one line."""
    return b"data: " + encode_json(value) + b"\n\n"
