"""An MCP server's answer to a call, as a tool's result."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from verl_tool.content.parts import MediaPart, as_parts, from_wire, reject_too_much
from verl_tool.errors import ContentError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.servers.mcp.bounds import MAX_IMAGE_CHARACTERS
from verl_tool.servers.tools._programs import combine_parts, cut_parts
from verl_tool.servers.tools.base import ToolResult

if TYPE_CHECKING:
    from mcp_types import CallToolResult

_MEDIA_TYPE = re.compile(r"(image|audio)/[A-Za-z0-9.+-]{1,64}")


def to_result(name: str, answer: CallToolResult, max_length: int) -> ToolResult:
    """The texts one below the other, shortened to `max_length` characters; images and audios stand where they are among
    them. Takes tens of milliseconds with images: call it in a thread.

    `name`: of the tool. Raises ToolFault ``tool_crashed`` that names it, if the answer holds what cannot be carried: an
    image above `MAX_IMAGE_CHARACTERS` or of an unknown type, too many of them, other binary data.
    """
    parts: list[str | MediaPart] = []
    for block in answer.content:
        part = _part(name, block)
        below = isinstance(part, str) and parts and isinstance(parts[-1], str)
        parts += ["\n", part] if below else [part]
    if not answer.content and answer.structured_content is not None:
        parts.append(json.dumps(answer.structured_content, ensure_ascii=False))
    visible = cut_parts(parts, max_length)
    try:
        reject_too_much(as_parts(visible))
    except ContentError as error:
        raise _rejection(name, str(error)) from error
    return combine_parts(visible, error=answer.is_error, metrics={})


def _part(name: str, block: Any) -> str | MediaPart:
    if block.type == "text":
        return str(block.text)
    if block.type in ("image", "audio"):
        return _media(name, block.mime_type, block.data)
    if block.type == "resource_link":
        return f"{block.name}: {block.uri}"
    if (text := getattr(block.resource, "text", None)) is not None:
        return str(text)
    return _media(name, block.resource.mime_type or "", block.resource.blob)


def _media(name: str, kind: str, data: str) -> MediaPart:
    if not _MEDIA_TYPE.fullmatch(kind):
        raise _rejection(name, f"binary data of type {kind[:80]!r}, which no model reads")
    if len(data) > MAX_IMAGE_CHARACTERS:
        raise _rejection(name, f"{kind} of {len(data)} characters; at most {MAX_IMAGE_CHARACTERS} are carried")
    try:
        return from_wire(f"data:{kind};base64,{data}")
    except ContentError as error:
        raise _rejection(name, f"{kind} that cannot be carried: {error}") from error


def _rejection(name: str, what: str) -> ToolFault:
    return ToolFault(FaultKind.TOOL_CRASHED, f"tool {name} answered with {what}", retryable=False)
