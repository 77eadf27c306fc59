"""JSON for text that a model or a program wrote.

The usual text goes the fast way. A lone surrogate (half of a UTF-16 pair, which JSON can spell and UTF-8 cannot)
becomes U+FFFD, NaN and infinity become null; neither costs the rest of its batch anything.

This module imports nothing else of the project.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


class BadJsonError(ValueError):
    """Bytes that are no JSON; the message says where they break."""


def decode_json(body: bytes) -> Any:
    """The JSON value in `body`. Raises BadJsonError that says where it breaks."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_patiently(body)
    except RecursionError:
        raise _too_deep() from None


def encode_json(value: object) -> bytes:
    """`value` as JSON. Raises TypeError for what JSON cannot hold."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(_without_surrogates(value))


def _decode_patiently(body: bytes) -> Any:
    try:
        return _without_surrogates(json.loads(body.decode("utf-8")))
    except UnicodeDecodeError as error:
        raise BadJsonError(
            f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}; encode it as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise BadJsonError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> BadJsonError:
    return BadJsonError("the body is nested too deeply; nest it less than some hundred levels")


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        # A pair of surrogates is one character; a lone one is none.
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value
