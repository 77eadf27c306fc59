"""JSON for text that a model or a program wrote.

The usual text goes the fast way. A lone surrogate (half of a UTF-16 pair, which JSON can spell and UTF-8 cannot)
becomes U+FFFD, NaN and infinity become null; neither costs the rest of its batch anything.

This module imports nothing else of the project.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_VALUES = 100_000
"""Most values (texts, numbers, lists, objects) in the body of a request."""
MAX_CONTAINERS = 32_768
"""Most lists and objects among them: one costs ten times what a number does."""
MAX_DEPTH = 64
"""Deepest nesting of lists and objects in the body of a request."""
MAX_LENIENT_BYTES = 2 << 20
"""Largest body of a request that is read by the slow decoder, which takes NaN and lone surrogates."""
_MAX_DIGITS = 400
"""Longer whole numbers are beyond a float's range, and Python takes a time that grows with the square to read them."""

_encode = msgspec.json.Encoder().encode


class BadJsonError(ValueError):
    """Bytes that are no JSON, or more of it than is taken; the message says where they break."""


def decode_json(body: bytes) -> Any:
    """The JSON value in `body`. Raises BadJsonError that says where it breaks."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_leniently(body)
    except RecursionError:
        raise _too_deep() from None


def decode_request_json(body: bytes) -> Any:
    """The JSON value in the body of a request, which may be anybody's: as `decode_json`, within limits.

    Reading one value costs more than a hundred bytes of text do, so values are bounded and not only bytes.
    """
    if len(body) > MAX_CONTAINERS:
        reject_too_many_values(body)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if len(body) > MAX_LENIENT_BYTES:
            raise BadJsonError(
                f"the body is not strict JSON ({error}) and larger than {MAX_LENIENT_BYTES} bytes; correct it, or, if "
                "it holds NaN or half of a surrogate pair, send a smaller one"
            ) from None
        value = _decode_leniently(body)
    except RecursionError:
        raise _too_deep() from None
    # Nothing is nested deeper than there are opening brackets, and most bodies have few.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise _too_deep()
    return value


def encode_json(value: object) -> bytes:
    """`value` as JSON. Raises TypeError for what JSON cannot hold."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(_without_surrogates(value))


def as_object(value: object) -> dict[str, Any] | None:
    """Return an object that is held as such or as JSON (parquet gives all objects of a column the same keys); None if
    `value` is neither."""
    try:
        content = json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError):
        return None
    return dict(content) if isinstance(content, Mapping) else None


def excerpt(value: object, most: int = 80) -> str:
    """How an error message quotes what somebody sent: on one line, about `most` characters, quickly made."""
    if isinstance(value, str):
        return repr(value[:most])
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    if isinstance(value, int) and value.bit_length() > 4 * most:
        return "a number of very many digits"
    return repr(value)[:most]


def reject_too_many_values(body: bytes) -> None:
    """Raise BadJsonError if `body` has more than `MAX_VALUES` values or `MAX_CONTAINERS` lists and objects."""
    # A value stands behind a comma or an opening bracket, or is the first of all.
    containers = _containers(body)
    if containers <= MAX_CONTAINERS and containers + body.count(b",") < MAX_VALUES:
        return
    # Most of them may stand within texts: count again without escaped quotes and without what is between quotes.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    values = bare.count(b'"') > 4 * MAX_VALUES
    outside = b"" if values else b"".join(bare.split(b'"')[::2])
    if values or _separators(outside) >= MAX_VALUES:
        raise BadJsonError(f"the body holds more than {MAX_VALUES} values; send fewer in one request")
    if _containers(outside) > MAX_CONTAINERS:
        raise BadJsonError(f"the body holds more than {MAX_CONTAINERS} lists and objects; send fewer in one request")


def _containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _separators(text: bytes) -> int:
    return text.count(b",") + _containers(text)


def _is_deeper(value: object, limit: int) -> bool:
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(limit):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (list, dict))
        ]
    return bool(level)


def _decode_leniently(body: bytes) -> Any:
    try:
        return _without_surrogates(json.loads(body.decode("utf-8"), parse_int=_whole_number))
    except UnicodeDecodeError as error:
        raise BadJsonError(
            f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}; encode it as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise BadJsonError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None


def _whole_number(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise BadJsonError(f"the body holds a whole number of {len(digits)} digits; at most {_MAX_DIGITS} are taken")
    return int(digits)


def _too_deep() -> BadJsonError:
    return BadJsonError(f"the body is nested too deeply; nest it at most {MAX_DEPTH} levels")


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        # A pair of surrogates is one character; a lone one is none.
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value
