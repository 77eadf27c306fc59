"""Reads the requests of one session. Agents send their whole history with each request: what is byte for byte as in an
earlier one is not parsed again."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from verl_tool.gateway.conversation import AgentRequest, MessageList
from verl_tool.gateway.dialects.base import Dialect
from verl_tool.util.json_text import BadJsonError, decode_request_json, reject_too_many_values

_MAX_HISTORIES = 8
"""Histories that are remembered: those of the last requests."""
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


@dataclass(frozen=True)
class _History:
    """What was read of a request."""

    hashes: tuple[bytes, ...]
    """Of the items of its history."""
    found: MessageList
    tools: tuple[Mapping[str, Any], ...]
    deferred_tools: tuple[Mapping[str, Any], ...]


class RequestReader:
    """Reads requests. Threads may share it."""

    def __init__(self) -> None:
        self._histories: dict[bytes, _History] = {}
        """By the hash of what the meaning of a history depends on, and of its first item."""
        self._lock = threading.Lock()

    def read(self, body: bytes, dialect: Dialect, headers: Mapping[str, str]) -> AgentRequest:
        """The request in `body`. Raises BadJsonError, or RequestError that names the field."""
        try:
            reject_too_many_values(body)
            fields = _decode_fields(body)
            items = _decode_items(fields.pop(dialect.history_field))
        except (msgspec.DecodeError, KeyError, UnicodeDecodeError, RecursionError):
            return dialect.parse_request(_read_object(body), headers)
        hashes = tuple(hashlib.sha256(item).digest() for item in items)
        tools = bytes(fields.get("tools", b""))
        key = hashlib.sha256(b"\0".join([dialect.name.encode(), *hashes[:1], tools])).digest()
        known = self._histories.get(key)
        n = 0 if known is None else _common_length(known.hashes, hashes)
        try:
            values = {name: decode_request_json(bytes(raw)) for name, raw in fields.items()}
            values[dialect.history_field] = [decode_request_json(bytes(item)) for item in items[n:]]
        except BadJsonError:  # say where it is in the whole body
            return dialect.parse_request(_read_object(body), headers)
        found = MessageList() if known is None else known.found.up_to(n)
        request = dialect.parse_request(values, headers, found)
        if known is not None:  # the same objects, by which the session tree knows them
            request = replace(request, tools=known.tools, deferred_tools=known.deferred_tools)
        with self._lock:
            self._histories.pop(key, None)
            self._histories[key] = _History(hashes, found, request.tools, request.deferred_tools)
            while len(self._histories) > _MAX_HISTORIES:
                del self._histories[next(iter(self._histories))]
        return request


def _read_object(body: bytes) -> Mapping[str, object]:
    value = decode_request_json(body) if body else {}
    if not isinstance(value, dict):
        raise BadJsonError("it must be an object")
    return value


def _common_length(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> int:
    """Length of the common beginning."""
    if b[: len(a)] == a:
        return len(a)
    return next(n for n, (x, y) in enumerate(zip((*a, b""), (*b, b""), strict=False)) if x != y)
