"""Anthropic's Messages API (https://platform.claude.com/docs/en/api/messages).

Claude Code, claude-agent-sdk, pi, LangChain and pydantic-ai speak it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from verl_tool.content.parts import ImagePart, TextPart, from_wire
from verl_tool.errors import ContentError
from verl_tool.gateway.conversation import (
    AgentMessage,
    AgentRequest,
    ContentPart,
    Finish,
    MessageList,
    ModelAnswer,
    Role,
    ToolCall,
)
from verl_tool.gateway.dialects.base import RequestError
from verl_tool.util.json_text import BadJsonError, decode_request_json, encode_json, excerpt

_UNPARSED = "__unparsedToolInput"
"""Claude Code puts arguments that are not a JSON object under this key, as ``{"raw": text, "len": bytes}``. It sends
them back so, and answers the model itself."""
_BILLING = "x-anthropic-billing-header"
"""How a block of Claude Code's system prompt begins that names its version. It changes between requests."""
_FIELDS = {"model", "messages", "system", "tools", "stream", "max_tokens", "stop_sequences"}
_SERVER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_", "advisor_", "mcp_toolset")
"""How types of tools begin that Anthropic's servers run. Other types but ``custom`` are the client's, without a schema
that a model could be given."""
_STOP_REASONS = {Finish.STOP: "end_turn", Finish.CALLS: "tool_use", Finish.LENGTH: "max_tokens"}
_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_Tool: TypeAlias = "dict[str, Any]"
_Blocks: TypeAlias = "list[tuple[str, Mapping[str, Any]]]"
"""Objects with their places in a request."""
_TYPE_NAMES = {str: "a string", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}


def _event(value: Mapping[str, Any]) -> bytes:
    """One event, with its type as its name: Anthropic's clients pass over events without a name, errors too."""
    return b"event: " + value["type"].encode() + b"\ndata: " + encode_json(value) + b"\n\n"


class MessagesDialect:
    """The Messages API."""

    name = "messages"
    path = "/v1/messages"
    history_field = "messages"
    ping = _event({"type": "ping"})

    def parse_request(
        self, body: Mapping[str, Any], headers: Mapping[str, str], found: MessageList | None = None
    ) -> AgentRequest:
        """Read a request, or the body of one that counts tokens. Raises RequestError that names the field.

        Deferred tools (``defer_loading``) are not in the prompt; a result that refers to one describes it.
        """
        tools, deferred, server_tools = _parse_tools(body)
        settings = {name: value for name, value in body.items() if name not in _FIELDS}
        if server_tools:
            settings["server_tools"] = server_tools
        if betas := headers.get("anthropic-beta"):
            settings["betas"] = betas.split(",")
        max_tokens = _value(body, "max_tokens", int, "", None)
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}; give at least 1")
        stop = _value(body, "stop_sequences", list, "", [])
        if not all(isinstance(each, str) and each for each in stop):
            raise RequestError("stop_sequences holds something other than texts; give texts that are not empty")
        return AgentRequest(
            dialect=self.name,
            messages=_MessageReader(deferred, MessageList() if found is None else found).read(body),
            tools=tuple(tools),
            deferred_tools=tuple(deferred.values()),
            model=_value(body, "model", str, "", ""),
            stream=_value(body, "stream", bool, "", False),
            max_tokens=max_tokens,
            stop=tuple(stop),
            agent_id=headers.get("x-claude-code-agent-id", ""),
            settings=settings,
        )

    def render_answer(self, answer: ModelAnswer, request: AgentRequest) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        stopped = answer.finish is Finish.STOP and answer.stop_string is not None
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": _content_blocks(answer, request),
            "stop_reason": "stop_sequence" if stopped else _STOP_REASONS[answer.finish],
            "stop_sequence": answer.stop_string if stopped else None,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": answer.completion_tokens,
            },
        }

    def stream_answer(self, answer: ModelAnswer, request: AgentRequest) -> Iterator[bytes]:
        """The same as server-sent events, the last one included. Each block comes in one piece."""
        whole = self.render_answer(answer, request)
        usage = {**whole["usage"], "output_tokens": 0}
        empty = {"content": (), "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event({"type": "message_start", "message": {**whole, **empty}})
        for index, block in enumerate(whole["content"]):
            begin, deltas = _split_block(block)
            yield _event({"type": "content_block_start", "index": index, "content_block": {**block, **begin}})
            for delta in deltas:
                yield _event({"type": "content_block_delta", "index": index, "delta": delta})
            yield _event({"type": "content_block_stop", "index": index})
        end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event({"type": "message_delta", "delta": end, "usage": whole["usage"]})
        yield _event({"type": "message_stop"})

    def render_error(self, status: int, message: str) -> dict[str, Any]:
        """The body of an error, or the value of an event that ends a stream."""
        kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def render_error_event(self, status: int, message: str) -> bytes:
        """An error that ends a stream."""
        return _event(self.render_error(status, message))


def render_token_count(count: int) -> dict[str, Any]:
    """The body of an answer of ``/v1/messages/count_tokens``."""
    return {"input_tokens": count}


class _MessageReader:
    """Reads the system prompt and the messages of a request."""

    def __init__(self, deferred: Mapping[str, Mapping[str, Any]], found: MessageList) -> None:
        self._deferred = deferred
        self._list = found

    def read(self, body: Mapping[str, Any]) -> tuple[AgentMessage, ...]:
        system = body.get("system")
        texts = [self._parse_text(block, where) for where, block in _blocks(system, "system")] if system else []
        text = "\n".join(each for each in texts if not each.startswith(_BILLING))
        messages = _value(body, "messages", list, "")
        for where, message in _objects(messages, "messages", self._list.num_items):
            role = _value(message, "role", str, where)
            blocks = _blocks(message.get("content"), f"{where}.content")
            if role == "assistant":
                self._add_assistant(blocks)
            elif role in ("user", "system"):
                self._add_other(Role(role), blocks)
            else:
                raise RequestError(f"{where}.role is {excerpt(role)}; it must be user, assistant or system")
            self._list.end_item()
        found = self._list.messages()
        if not self._list.num_items or not (text or found):
            raise RequestError("messages holds no message with content; give at least one")
        return (AgentMessage(Role.SYSTEM, (TextPart(text),)), *found) if text else found

    def _add_assistant(self, blocks: _Blocks) -> None:
        parts: list[ContentPart] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        handles: list[str] = []
        for where, block in blocks:
            kind = block["type"]
            if kind == "thinking":
                thoughts.append(_value(block, "thinking", str, where, ""))
                handles.append(_value(block, "signature", str, where, ""))
            elif kind == "redacted_thinking":
                handles.append(_value(block, "data", str, where))
            elif kind == "tool_use":
                calls.append(_parse_call(block, where))
            elif not _is_of_server(kind):
                parts.append(TextPart(self._parse_text(block, where)))
        named = tuple(handle for handle in handles if handle)
        self._list.add_assistant(
            AgentMessage(Role.ASSISTANT, tuple(parts), "".join(thoughts), tuple(calls), handles=named)
        )

    def _add_other(self, role: Role, blocks: _Blocks) -> None:
        """Add what a user or the system says. Results of tools become messages of their own, in their place."""
        parts: list[ContentPart] = []
        for where, block in blocks:
            if block["type"] == "tool_result" and role is Role.USER:
                if parts:
                    self._list.add(AgentMessage(role, tuple(parts)))
                    parts = []
                content = _blocks(block.get("content") or [], f"{where}.content")
                result = [self._parse_part(*each) for each in content]
                call_id = _value(block, "tool_use_id", str, where)
                self._list.add_result(call_id, result, is_error=_value(block, "is_error", bool, where, False))
            elif not _is_of_server(block["type"]):
                parts.append(self._parse_part(where, block))
                if role is Role.SYSTEM and not isinstance(parts[-1], TextPart):
                    raise RequestError(f"{where}.type is {excerpt(block['type'])}; a system message holds text alone")
        if parts:
            self._list.add(AgentMessage(role, tuple(parts)))

    def _parse_part(self, where: str, block: Mapping[str, Any]) -> ContentPart:
        return _parse_image(block, where) if block["type"] == "image" else TextPart(self._parse_text(block, where))

    def _parse_text(self, block: Mapping[str, Any], where: str) -> str:
        if block["type"] == "text":
            return _value(block, "text", str, where)
        if block["type"] == "tool_reference":
            return self._describe_tool(_value(block, "tool_name", str, where))
        if block["type"] == "tool_addition":
            reference = _value(block, "tool", dict, where)
            return self._describe_tool(_value(reference, "name", str, f"{where}.tool"))
        raise RequestError(f"{where}.type is {excerpt(block['type'])}, which is not supported here; send text instead")

    def _describe_tool(self, name: str) -> str:
        tool = self._deferred.get(name)
        return json.dumps(tool["function"], ensure_ascii=False) if tool else name


def _parse_image(block: Mapping[str, Any], where: str) -> ImagePart:
    source = _value(block, "source", dict, where)
    if source.get("type") != "base64":
        raise RequestError(f"{where}.source.type is {excerpt(source.get('type'))}; send the image itself, as base64")
    data = _value(source, "data", str, f"{where}.source")
    try:
        part = from_wire(f"data:image/any;base64,{data}")
    except ContentError as error:
        raise RequestError(f"{where}.source: {error}") from None
    assert isinstance(part, ImagePart)
    return part


def _parse_call(block: Mapping[str, Any], where: str) -> ToolCall:
    name, call_id = _value(block, "name", str, where), _value(block, "id", str, where)
    inputs = _value(block, "input", dict, where)
    unparsed = inputs.get(_UNPARSED) if len(inputs) == 1 else None
    raw = unparsed.get("raw") if isinstance(unparsed, dict) else unparsed
    if isinstance(raw, str):
        return ToolCall(name, raw, call_id, error="the arguments are not a JSON object")
    return ToolCall(name, json.dumps(inputs, ensure_ascii=False), call_id)


def _parse_tools(body: Mapping[str, Any]) -> tuple[list[_Tool], dict[str, _Tool], list[str]]:
    """Tools that the model sees, deferred ones by name, and the types of those that a server of Anthropic would run."""
    tools, deferred, of_server = [], {}, []
    for where, tool in _objects(_value(body, "tools", list, "", []), "tools"):
        kind = _value(tool, "type", str, where, "custom")
        if kind.startswith(_SERVER_TOOLS):
            of_server.append(kind)
            continue
        if kind != "custom":
            raise RequestError(f"{where}.type is {excerpt(kind)}; give a custom tool with an input_schema instead")
        function = {
            "name": _value(tool, "name", str, where),
            "description": _value(tool, "description", str, where, ""),
            "parameters": _value(tool, "input_schema", dict, where),
        }
        converted = {"type": "function", "function": function}
        if _value(tool, "defer_loading", bool, where, False):
            deferred[function["name"]] = converted
        else:
            tools.append(converted)
    if any(kind.startswith("tool_search_") for kind in of_server):
        # Nobody searches them here, so the model could never find them.
        return [*tools, *deferred.values()], {}, of_server
    return tools, deferred, of_server


def _is_of_server(kind: str) -> bool:
    """Whether a block of this type stands for what Anthropic's servers ran, which is nothing here."""
    return kind in ("server_tool_use", "mcp_tool_use") or kind.endswith("_tool_result")


def _content_blocks(answer: ModelAnswer, request: AgentRequest) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    thinking = request.settings.get("thinking")
    is_disabled = isinstance(thinking, Mapping) and thinking.get("type") == "disabled"
    if answer.thoughts and not is_disabled:
        blocks.append({"type": "thinking", "thinking": answer.thoughts, "signature": answer.id})
    if answer.text:
        blocks.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input_of(call)})
    return blocks


def _input_of(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call as an object.

    What is not an object goes out in the form in which Claude Code would send it back. Every client can read that, the
    tool's schema rejects it, and the text comes back whole. A stream could carry the broken text itself, as the API
    does for tools with ``eager_input_streaming``, but then Anthropic's SDK for Python reads ``{"path": "a`` as ``{}``,
    raises for most other errors, and pi repairs the call and runs it.
    """
    data = call.arguments.encode("utf-8", "surrogatepass")
    try:
        value = decode_request_json(data)
    except BadJsonError:
        value = None
    return value if isinstance(value, dict) else {_UNPARSED: {"raw": call.arguments, "len": len(data)}}


def _split_block(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fields with which a block of a stream begins, and the events that fill them."""
    if block["type"] == "text":
        return {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        arguments = encode_json(block["input"]).decode()
        return {"input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    thoughts = {"type": "thinking_delta", "thinking": block["thinking"]}
    signature = {"type": "signature_delta", "signature": block["signature"]}
    return {"thinking": "", "signature": ""}, [thoughts, signature]


def _blocks(content: object, where: str) -> _Blocks:
    """Blocks of a content with their places; a string is one block of text."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise RequestError(f"{where} is {excerpt(content)}; it must be a string or a list of blocks")
    blocks = _objects(content, where)
    for place, block in blocks:
        _value(block, "type", str, place)
    return blocks


def _objects(values: Sequence[object], where: str, start: int = 0) -> _Blocks:
    """`values`, which must be objects, with their places, counted from `start`."""
    found: _Blocks = []
    for index, value in enumerate(values, start):
        if not isinstance(value, dict):
            raise RequestError(f"{where}.{index} is {excerpt(value)}; it must be an object")
        found.append((f"{where}.{index}", value))
    return found


_REQUIRED: Any = object()


def _value(holder: Mapping[str, Any], name: str, kind: type, where: str, default: Any = _REQUIRED) -> Any:
    """A field of `holder`; `default` if it is absent or null. Raises RequestError if it is not a `kind`."""
    value = holder.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        place = f"{where}.{name}" if where else name
        raise RequestError(f"{place} is {excerpt(value)}; it must be {_TYPE_NAMES[kind]}")
    return value
