"""JSON in and out of the server, for text that a model or a program wrote.

The usual body is valid and goes the fast way. A lone surrogate (half of a UTF-16 pair, which JSON can spell and UTF-8
cannot) becomes U+FFFD, NaN and infinity become null; neither costs the rest of its batch anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from verl_tool.protocol import Fault, FaultKind, ObservationRequest, StepResult

Model = TypeVar("Model", bound=BaseModel)
_encode = msgspec.json.Encoder().encode


class BadBody(ValueError):
    """A body that cannot be served; `field` names what is wrong in it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


def decode_json(body: bytes) -> Any:
    """The JSON value in `body`. Raises BadBody that says where it breaks."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_patiently(body)


def decode_request(body: bytes) -> ObservationRequest:
    """Body of ``POST /get_observation``. Raises BadBody that names the field and the mend."""
    return decode_model(body, ObservationRequest)


def decode_model(body: bytes, model: type[Model]) -> Model:
    """`body` as a pydantic model. Raises BadBody that names the field and the mend."""
    value = decode_json(body)
    if not isinstance(value, dict):
        raise BadBody(f"the body is a JSON {_json_type(value)}; send an object with the fields {_fields(model)}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _bad_field(error, model) from None


def encode_json(value: object) -> bytes:
    """`value` as JSON. Raises TypeError for what JSON cannot hold."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(_without_surrogates(value))


def encode_response(
    results: Sequence[StepResult], processing_time_ms: float, error: Mapping[str, str | None] | None = None
) -> bytes:
    """Answer of ``POST /get_observation``: what `ObservationResponse` spells, faster; ``error`` beside it if given.

    A result that JSON cannot hold (an image that is no text, say) becomes the fault ``tool_crashed``.
    """
    beside = {} if error is None else {"error": error}
    try:
        return encode_json(beside | _response(results, processing_time_ms))
    except (TypeError, ValueError, RecursionError):
        return encode_json(beside | _response([_encodable(result) for result in results], processing_time_ms))


def _response(results: Sequence[StepResult], processing_time_ms: float) -> dict[str, object]:
    return {
        "observations": [_observation(result) for result in results],
        "dones": [result.done for result in results],
        "valids": [result.valid for result in results],
        "faults": [None if result.fault is None else result.fault.model_dump(mode="json") for result in results],
        "processing_time_ms": round(processing_time_ms, 3),
    }


def _observation(result: StepResult) -> object:
    details = (result.reward, result.image, result.audio, result.invalid_reason, result.metrics)
    if all(detail is None for detail in details):
        return result.observation
    names = ("reward", "image", "audio", "invalid_reason", "metrics")
    return {"obs": result.observation} | {name: v for name, v in zip(names, details, strict=True) if v is not None}


def _encodable(result: StepResult) -> StepResult:
    try:
        encode_json(_observation(result))
    except (TypeError, ValueError, RecursionError) as error:
        message = f"the tool's result cannot be sent as JSON: {error}; give images and audio as text (base64)"
        fault = Fault(kind=FaultKind.TOOL_CRASHED, message=message, retryable=False)
        return StepResult(result.trajectory_id, done=result.done, valid=False, fault=fault)
    return result


def _decode_patiently(body: bytes) -> Any:
    try:
        return _without_surrogates(json.loads(body.decode("utf-8")))
    except UnicodeDecodeError as error:
        raise BadBody(
            f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}; encode it as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise BadBody(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadBody("the body is nested too deeply; JSON of fewer than 500 levels is taken") from None


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        # A pair of surrogates is one character; a lone one is none.
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value


def _bad_field(error: ValidationError, model: type[BaseModel]) -> BadBody:
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "missing":
        return BadBody(f"{field!r} is missing; send an object with the fields {_fields(model)}", field)
    message = first["msg"].removeprefix("Value error, ")
    if field is None:
        return BadBody(message, _quoted_name(message))
    return BadBody(f"{field!r}: {message}; it is {str(first['input'])[:80]!r}", field)


def _quoted_name(message: str) -> str | None:
    """The field that a message about several fields begins with."""
    return message[1 : message.index("'", 1)] if message.startswith("'") and message.count("'") > 1 else None


def _fields(model: type[BaseModel]) -> str:
    return ", ".join(name if field.is_required() else f"[{name}]" for name, field in model.model_fields.items())


def _json_type(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
