"""What the two APIs of OpenAI share: fields of a request, parts of a message, tools, ids of sub-agents, events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from verl_tool.content.parts import ImagePart, TextPart, from_wire
from verl_tool.errors import ContentError
from verl_tool.gateway.conversation import ContentPart
from verl_tool.gateway.dialects.base import RequestError

_Value = TypeVar("_Value")
_TEXT_KEYS = {
    **dict.fromkeys(("text", "input_text", "output_text", "summary_text", "reasoning_text"), "text"),
    "refusal": "refusal",
}
"""In which field a part of this type has its text."""
_KINDS = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}


def read_field(fields: Mapping[str, Any], name: str, kind: type[_Value], where: str = "") -> _Value | None:
    """The value of a field; None if it is absent or null. Raises RequestError if it is not of `kind`."""
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise RequestError(f"{where}{name}: must be {_KINDS[kind]}, and is {describe(value)}")
    return value


def read_name(fields: Mapping[str, Any], where: str) -> str:
    """The name of a tool or a call. Raises RequestError if there is none."""
    name = read_field(fields, "name", str, where)
    if not name:
        raise RequestError(f"{where}name: missing")
    return name


def read_object(value: object, where: str) -> Mapping[str, Any]:
    """`value`, if it is an object. Raises RequestError."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{where}: must be an object, and is {describe(value)}")
    return value


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of these limits of tokens that is set. Raises RequestError if it is no whole number above 0."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1 or value < 1:
            raise RequestError(f"{name}: must be a whole number above 0, and is {describe(value)}")
        return int(value)
    return None


def read_content(value: object, where: str) -> tuple[ContentPart, ...]:
    """The parts of a content: null, a string, one part, or a list of them. Empty texts are left out.

    Raises RequestError that names the part.
    """
    if value is None or isinstance(value, str):
        return (TextPart(value),) if value else ()
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise RequestError(f"{where}: must be a string or a list of parts, and is {describe(value)}")
    parts = [_read_part(each, f"{where}[{place}]") for place, each in enumerate(value)]
    return tuple(part for part in parts if part != TextPart(""))


def read_text(value: object, where: str) -> str:
    """The text of a content. Raises RequestError if it has an image, or cannot be read."""
    parts = read_content(value, where)
    if not all(isinstance(part, TextPart) for part in parts):
        raise RequestError(f"{where}: must be text only")
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def read_arguments(value: object, where: str) -> str:
    """Arguments of a call: a string as it is, an object as JSON. Raises RequestError."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(read_object(value, where), ensure_ascii=False)
    except RecursionError:
        raise RequestError(f"{where}: nested too deeply") from None


def read_function(fields: Mapping[str, Any], where: str, name: str | None = None) -> dict[str, Any]:
    """A tool as chat templates take it, from its name, description and parameters. Raises RequestError."""
    function = {
        "name": name or read_name(fields, where),
        "description": read_field(fields, "description", str, where) or "",
        "parameters": read_field(fields, "parameters", dict, where) or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def read_text_tool(fields: Mapping[str, Any], where: str, name: str | None = None) -> dict[str, Any]:
    """A custom tool as a function with one argument, ``input``: templates know no other. Raises RequestError.

    A grammar that its text must follow is added to the description.
    """
    description = read_field(fields, "description", str, where) or ""
    text_format = fields.get("format")
    if isinstance(text_format, Mapping):
        grammar = text_format.get("grammar")
        source = grammar if isinstance(grammar, Mapping) else text_format
        if isinstance(source.get("definition"), str):
            syntax = f" ({source['syntax']})" if isinstance(source.get("syntax"), str) else ""
            description += f"\n\nThe input follows this grammar{syntax}:\n{source['definition']}"
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return read_function(
        {"name": fields.get("name"), "description": description.strip(), "parameters": parameters}, where, name
    )


def read_agent_id(headers: Mapping[str, str]) -> str:
    """The sub-agent or thread that asks, by the headers of Codex and opencode; empty for the main agent."""
    if headers.get("x-openai-subagent") or headers.get("x-codex-parent-thread-id"):
        return headers.get("thread-id") or headers.get("x-openai-subagent") or headers["x-codex-parent-thread-id"]
    if headers.get("x-parent-session-id"):
        return headers.get("x-session-id") or headers["x-parent-session-id"]
    return ""


def render_openai_error(status: int, message: str) -> dict[str, Any]:
    """The body of an error. The clients decide by the status whether they ask again."""
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    return {"error": {"message": message, "type": kinds.get(status, "server_error"), "param": None, "code": None}}


def render_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event. Escaped to ASCII: half a surrogate pair of the model would not be UTF-8."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _read_part(value: object, where: str) -> ContentPart:
    if isinstance(value, str):
        return TextPart(value)
    part = read_object(value, where)
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise RequestError(f"{where}.type: must be a string, and is {describe(kind)}")
    if kind in _TEXT_KEYS:
        return TextPart(read_field(part, _TEXT_KEYS[kind], str, f"{where}.") or "")
    if kind not in ("image_url", "input_image"):
        raise RequestError(f"{where}.type: {kind[:40]!r} is not supported; send text, or images as data URIs")
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    if not isinstance(url, str):
        raise RequestError(f"{where}.image_url: must be a data URI, and is {describe(url)}")
    try:
        image = from_wire(url)
    except ContentError as error:
        raise RequestError(f"{where}.image_url: {error}") from None
    if not isinstance(image, ImagePart):
        raise RequestError(f"{where}.image_url: is {image.media_type}; audio is not supported")
    return image


def describe(value: object) -> str:
    """What `value` is, for a message: its type, and the value of a number."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    text = f" {value}" if isinstance(value, (bool, int, float)) and abs(value) < 1e15 else ""
    return names.get(type(value), type(value).__name__) + text
