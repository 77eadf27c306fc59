"""The JSON inside a call: ``{"name": "calculator", "arguments": {"expression": "1+1"}}``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DECODER = json.JSONDecoder(strict=False)
"""Models write line ends into strings; that is harmless here, so it is allowed."""
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,200})"')
SHAPE = '{"name": "…", "arguments": {…}}'


@dataclass(frozen=True)
class JsonCall:
    """What a payload says. With `error`, the name is what could still be made out, or empty."""

    name: str = ""
    input: str = ""
    arguments: Mapping[str, Any] | None = None
    error: str | None = None
    """In words for the model."""


def parse(payload: str) -> JsonCall:
    """Read one call. Total: a payload that is none gives a `JsonCall` with `error`."""
    try:
        value = decode(payload)
    except ValueError as error:
        return _broken(payload, f"This call is not valid JSON: {error}. Write {SHAPE}.")
    return from_value(payload, value)


def parse_arguments(name: str, payload: str) -> JsonCall:
    """Read the arguments of a call whose name stands outside of the JSON; without a payload there are none. Total, as
    `parse`."""
    try:
        value = decode(payload) if payload.strip() else {}
    except ValueError as error:
        description = f"The arguments of this call are not valid JSON: {error}. Write {{…}}, one JSON object."
        return JsonCall(name, payload, error=description)
    if not isinstance(value, dict):
        kind = type(value).__name__
        return JsonCall(
            name, payload, error=f"The arguments of this call are a JSON {kind}, not an object. Write {{…}}."
        )
    return JsonCall(name, as_input(value), value)


def decode(payload: str) -> Any:
    """The JSON value of the whole payload. Raises ValueError with words for the model."""
    value, end = decode_prefix(payload)
    if payload[end:].strip():
        raise ValueError(f"something follows its end at character {end}")
    return value


def decode_prefix(text: str) -> tuple[Any, int]:
    """The JSON value at the start of `text`, and the offset behind it. Raises ValueError with words for the model."""
    return decode_at(text, len(text) - len(text.lstrip()))


def decode_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and the offset behind it. Raises ValueError with words for the model."""
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:  # int() refuses numbers of several thousand digits
        raise ValueError("it holds a number that is too long") from error


def from_value(payload: str, value: Any) -> JsonCall:
    """The call that a JSON value is; `payload` is its text."""
    if not isinstance(value, dict):
        return _broken(payload, f"This call is a JSON {type(value).__name__}, not an object. Write {SHAPE}.")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return JsonCall(error=f'This call has no "name" that is a string. Write {SHAPE}.')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _decoded_arguments(arguments)
    if isinstance(arguments, str):
        return JsonCall(name, arguments)
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return JsonCall(name, error=f'"arguments" of this call is a JSON {kind}, not an object. Write {SHAPE}.')
    return JsonCall(name, as_input(arguments), arguments)


def _decoded_arguments(text: str) -> Any:
    """OpenAI's API gives arguments as a JSON string; a string that is no JSON object is the input itself."""
    try:
        value = decode(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def as_input(arguments: Mapping[str, Any]) -> str:
    """The arguments as one text: the one that is a string, if there is just one, else all of them as JSON."""
    strings = [value for value in arguments.values() if isinstance(value, str)]
    return strings[0] if len(strings) == 1 else json.dumps(arguments, ensure_ascii=False)


def _broken(payload: str, error: str) -> JsonCall:
    name = _NAME.search(payload)
    return JsonCall(name[1] if name else "", payload, error=error)
