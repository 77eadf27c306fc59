"""An MCP server's answer to a call, as a tool's result."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.servers.mcp.bounds import MAX_IMAGE_CHARACTERS
from verl_tool.servers.tools.base import ToolResult

if TYPE_CHECKING:
    from mcp_types import CallToolResult

_IMAGE_TYPE = re.compile(r"image/[A-Za-z0-9.+-]{1,64}")
_AUDIO_TYPE = re.compile(r"audio/[A-Za-z0-9.+-]{1,64}")


def to_result(name: str, answer: CallToolResult, max_length: int) -> ToolResult:
    """The texts one below the other, shortened to `max_length` characters; an image and an audio as data URIs.

    `name`: of the tool. Raises ToolFault ``tool_crashed`` that names it, if the answer holds what cannot be carried:
    two images, an image above `MAX_IMAGE_CHARACTERS`, other binary data.
    """
    texts: list[str] = []
    images: list[str] = []
    audios: list[str] = []
    for block in answer.content:
        _sort(name, block, texts, images, audios)
    for what, found in (("images", images), ("audios", audios)):
        if len(found) > 1:
            raise _refused(name, f"{len(found)} {what}; a result carries one")
    if not answer.content and answer.structured_content is not None:
        texts.append(json.dumps(answer.structured_content, ensure_ascii=False))
    return ToolResult(
        _shortened("\n".join(texts), max_length),
        error=answer.is_error,
        image=images[0] if images else None,
        audio=audios[0] if audios else None,
    )


def _sort(name: str, block: Any, texts: list[str], images: list[str], audios: list[str]) -> None:
    if block.type == "text":
        texts.append(block.text)
    elif block.type == "image":
        images.append(_data_uri(name, block.mime_type, block.data))
    elif block.type == "audio":
        audios.append(_data_uri(name, block.mime_type, block.data))
    elif block.type == "resource_link":
        texts.append(f"{block.name}: {block.uri}")
    elif (text := getattr(block.resource, "text", None)) is not None:
        texts.append(text)
    else:
        images.append(_data_uri(name, block.resource.mime_type or "", block.resource.blob))


def _data_uri(name: str, kind: str, data: str) -> str:
    if not (_IMAGE_TYPE.fullmatch(kind) or _AUDIO_TYPE.fullmatch(kind)):
        raise _refused(name, f"binary data of type {kind[:80]!r}, which no model reads")
    if len(data) > MAX_IMAGE_CHARACTERS:
        raise _refused(name, f"{kind} of {len(data)} characters; at most {MAX_IMAGE_CHARACTERS} are carried")
    return f"data:{kind};base64,{data}"


def _refused(name: str, what: str) -> ToolFault:
    return ToolFault(FaultKind.TOOL_CRASHED, f"tool {name} answered with {what}", retryable=False)


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[-(limit - head) :]}"
