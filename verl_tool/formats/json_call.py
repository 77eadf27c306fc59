"""Parse the JSON inside a call: ``{"name": "calculator", "arguments": {"expression": "1+1"}}``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DECODER = json.JSONDecoder(strict=False)
"""Decoder that allows line ends in strings, since models write them and they are harmless here."""
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,200})"')
SHAPE = '{"name": "…", "arguments": {…}}'


@dataclass(frozen=True)
class JsonCall:
    """The parsed payload of a call. With `error`, the name is set if it could be read, else empty."""

    name: str = ""
    input: str = ""
    arguments: Mapping[str, Any] | None = None
    error: str | None = None
    """Message for the model."""


def parse(payload: str) -> JsonCall:
    """Parse one call. An invalid payload gives a `JsonCall` with `error`; nothing is raised."""
    try:
        value = decode(payload)
    except ValueError as error:
        return _broken(payload, f"This call is not valid JSON: {error}. Write {SHAPE}.")
    return from_value(payload, value)


def parse_arguments(name: str, payload: str) -> JsonCall:
    """Parse the arguments of a call whose name is outside of the JSON. An empty payload means no arguments. Nothing is
    raised, as in `parse`."""
    try:
        value = decode(payload) if payload.strip() else {}
    except ValueError as error:
        message = f"The arguments of this call are not valid JSON: {error}. Write {{…}}, one JSON object."
        return JsonCall(name, payload, error=message)
    if not isinstance(value, dict):
        kind = type(value).__name__
        return JsonCall(
            name, payload, error=f"The arguments of this call are a JSON {kind}, not an object. Write {{…}}."
        )
    return JsonCall(name, as_input(value), value)


def decode(payload: str) -> Any:
    """Decode the whole payload as JSON. Raises ValueError with a message for the model."""
    value, end = decode_prefix(payload)
    if payload[end:].strip():
        raise ValueError(f"something follows its end at character {end}")
    return value


def decode_prefix(text: str) -> tuple[Any, int]:
    """Decode the JSON value at the start of `text`. Returns it and the offset after it. Raises as `decode` does."""
    return decode_at(text, len(text) - len(text.lstrip()))


def decode_at(text: str, start: int) -> tuple[Any, int]:
    """Decode the JSON value at `start`. Returns it and the offset after it. Raises as `decode` does."""
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:  # int() rejects numbers of several thousand digits
        raise ValueError("it holds a number that is too long") from error


def from_value(payload: str, value: Any) -> JsonCall:
    """Convert a JSON value, whose text is `payload`, to a call."""
    if not isinstance(value, dict):
        return _broken(payload, f"This call is a JSON {type(value).__name__}, not an object. Write {SHAPE}.")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return JsonCall(error=f'This call has no "name" that is a string. Write {SHAPE}.')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _decode_arguments(arguments)
    if isinstance(arguments, str):
        return JsonCall(name, arguments)
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return JsonCall(name, error=f'"arguments" of this call is a JSON {kind}, not an object. Write {SHAPE}.')
    return JsonCall(name, as_input(arguments), arguments)


def _decode_arguments(text: str) -> Any:
    """Decode arguments that are a JSON string, as in OpenAI's API. Any other string is returned as the input."""
    try:
        value = decode(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def as_input(arguments: Mapping[str, Any]) -> str:
    """Return the arguments as one text: the only string argument, or else all of them as JSON."""
    strings = [value for value in arguments.values() if isinstance(value, str)]
    return strings[0] if len(strings) == 1 else json.dumps(arguments, ensure_ascii=False)


def _broken(payload: str, error: str) -> JsonCall:
    name = _NAME.search(payload)
    return JsonCall(name[1] if name else "", payload, error=error)
