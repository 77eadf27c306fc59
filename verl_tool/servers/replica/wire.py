"""Decode and encode the bodies of the tool server. A rejection names the wrong field and says what to send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from verl_tool.content.parts import AudioPart, ImagePart, encoded_bytes, to_wire
from verl_tool.http.messages import HttpError
from verl_tool.protocol import Fault, FaultKind, ObservationRequest, StepRequest, StepResult
from verl_tool.util.json_text import BadJsonError, decode_request_json, encode_json, excerpt

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


INLINE_BYTES = 64 << 10
"""Larger bodies are decoded and encoded in a thread, so that other requests can run meanwhile."""

_DETAILS = ("reward", "image", "audio", "invalid_reason", "metrics", "role")
_FIELDS_BYTES = 100
"""Approximate size of a result, in addition to its observation."""
# One thread: more would compete with each other and with the event loop for the interpreter.
_readers = ThreadPoolExecutor(1, thread_name_prefix="request-reader")


async def decoded(decode: Callable[[bytes], Result], body: bytes) -> Result:
    """Return ``decode(body)``, computed in a thread if the body is large. `decode` may raise HttpError."""
    if len(body) <= INLINE_BYTES:
        return decode(body)
    return await asyncio.get_running_loop().run_in_executor(_readers, decode, body)


async def encoded(encode: Callable[[], bytes], size: int) -> bytes:
    """Return ``encode()``, computed in a thread if `size`, the approximate number of bytes, is large."""
    if size <= INLINE_BYTES:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(_readers, encode)


def size_of(results: Sequence[StepResult]) -> int:
    """Estimate the size of an answer in bytes."""
    size = _FIELDS_BYTES * len(results)
    for result in results:
        size += len(result.observation)
        if result.image is not None or result.audio is not None:
            size += 2 * (encoded_bytes(result.image) + encoded_bytes(result.audio))
    return size


def decode_request(body: bytes, max_entries: int) -> list[StepRequest | Fault]:
    """Decode the entries in a body of ``POST /get_observation``.

    Raises HttpError: 400 for a wrong field, 413 for more than `max_entries`.
    """
    request = decode_model(body, ObservationRequest)
    entries = len(request.trajectory_ids)
    if entries > max_entries:
        message = f"'trajectory_ids' has {entries} entries; this server takes at most {max_entries} at a time"
        raise HttpError(413, "batch_too_large", message, "trajectory_ids")
    return request.step_requests()


def decode_model(body: bytes, model: type[Model]) -> Model:
    """Decode `body` as a pydantic model. Raises HttpError 400 that names the wrong field and says what to send."""
    try:
        value = decode_request_json(body)
    except BadJsonError as error:
        raise _bad_body(str(error)) from None
    if not isinstance(value, dict):
        raise _bad_body(f"the body is a JSON {_json_type(value)}; send an object with the fields {_fields(model)}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _bad_field(error, model) from None


def encode_response(
    results: Sequence[StepResult],
    processing_time_ms: float,
    error: Mapping[str, str | None] | None = None,
    known_media: Sequence[Collection[str]] | None = None,
) -> bytes:
    """Encode the answer of ``POST /get_observation`` like `ObservationResponse`, but faster, and with `error` if given.

    `known_media`: for each result, hashes of the images and audios that its caller has already.
    A result that JSON cannot represent (an image as bytes, for example) becomes the fault ``tool_crashed``.
    """
    head = {} if error is None else {"error": error}
    sent = [_with_media(*pair) for pair in zip(results, known_media or repeat(()), strict=False)]
    try:
        return encode_json(head | _response(sent, processing_time_ms))
    except (TypeError, ValueError, RecursionError):
        return encode_json(head | _response([_encodable(result) for result in sent], processing_time_ms))


def _with_media(result: StepResult, known: Collection[str]) -> StepResult:
    """Replace the parts of a result by data URIs, and by references to those that are `known`."""
    if result.image is None and result.audio is None:
        return result
    return replace(result, image=_describe(result.image, known), audio=_describe(result.audio, known))


def _describe(media: object, known: Collection[str]) -> object:
    if not isinstance(media, list):
        return media
    return [to_wire(each, known) if isinstance(each, (ImagePart, AudioPart)) else each for each in media]


def _response(results: Sequence[StepResult], processing_time_ms: float) -> dict[str, object]:
    return {
        "observations": [_observation(result) for result in results],
        "dones": [result.done for result in results],
        "valids": [result.valid for result in results],
        "faults": [None if result.fault is None else result.fault.model_dump(mode="json") for result in results],
        "processing_time_ms": round(processing_time_ms, 3),
    }


def _observation(result: StepResult) -> object:
    details = {name: value for name in _DETAILS if (value := getattr(result, name)) is not None}
    if result.opening is not None:
        details["opening"] = result.opening.model_dump(mode="json")
    return {"obs": result.observation, **details} if details else result.observation


def _encodable(result: StepResult) -> StepResult:
    try:
        encode_json(_observation(result))
    except (TypeError, ValueError, RecursionError) as error:
        message = f"the tool's result cannot be sent as JSON: {error}; give images and audio as text (base64)"
        fault = Fault(kind=FaultKind.TOOL_CRASHED, message=message, retryable=False)
        return StepResult(result.trajectory_id, done=result.done, valid=False, fault=fault)
    return result


def _bad_field(error: ValidationError, model: type[BaseModel]) -> HttpError:
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or None
    if first["type"] == "missing":
        return _bad_body(f"{field!r} is missing; send an object with the fields {_fields(model)}", field)
    message = first["msg"].removeprefix("Value error, ")
    if field is None:
        return _bad_body(message, _quoted_name(message))
    return _bad_body(f"{field!r}: {message}; it is {excerpt(first['input'])}", field)


def _bad_body(message: str, field: str | None = None) -> HttpError:
    return HttpError(400, "bad_request", message, field)


def _quoted_name(message: str) -> str | None:
    """Return the quoted field name at the beginning of a message, None if there is none."""
    return message[1 : message.index("'", 1)] if message.startswith("'") and message.count("'") > 1 else None


def _fields(model: type[BaseModel]) -> str:
    return ", ".join(name if field.is_required() else f"[{name}]" for name, field in model.model_fields.items())


def _json_type(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
