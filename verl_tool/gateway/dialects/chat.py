"""The Chat Completions API of OpenAI: Qwen Code, opencode, pi, mini-swe-agent, LangChain, smolagents and many more.

Thoughts are in ``reasoning_content``, as vLLM and SGLang write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from verl_tool.gateway.conversation import AgentMessage, AgentRequest, Finish, MessageList, ModelAnswer, Role, ToolCall
from verl_tool.gateway.dialects.base import RequestError
from verl_tool.gateway.dialects.openai_fields import (
    describe,
    read_agent_id,
    read_arguments,
    read_content,
    read_field,
    read_function,
    read_limit,
    read_name,
    read_object,
    read_text,
    read_text_tool,
    render_event,
    render_openai_error,
)

_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER}
_FINISH = {Finish.STOP: "stop", Finish.CALLS: "tool_calls", Finish.LENGTH: "length"}
_READ = frozenset(["messages", "tools", "model", "stream", "max_tokens", "max_completion_tokens", "stop", "n"])
"""Fields that are not recorded as settings."""


class ChatDialect:
    """``/v1/chat/completions``."""

    name = "chat"
    path = "/v1/chat/completions"
    history_field = "messages"
    ping = b": ping\n\n"

    def parse_request(
        self, body: Mapping[str, Any], headers: Mapping[str, str], found: MessageList | None = None
    ) -> AgentRequest:
        """Read a request. Raises RequestError that names the field."""
        if body.get("n") not in (None, 1):
            raise RequestError("n: only 1 answer to a request is supported; send the request again for another")
        tools, text_tools = _read_tools(body)
        return AgentRequest(
            dialect=self.name,
            messages=_read_messages(body, MessageList() if found is None else found),
            tools=tools,
            text_tools=text_tools,
            model=read_field(body, "model", str) or "",
            stream=read_field(body, "stream", bool) or False,
            max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
            stop=_read_stop(body.get("stop")),
            agent_id=read_agent_id(headers),
            settings={name: value for name, value in body.items() if name not in _READ},
        )

    def render_answer(self, answer: ModelAnswer, request: AgentRequest) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        message: dict[str, Any] = {"role": "assistant", "content": _content(answer), "refusal": None}
        if answer.thoughts:
            message["reasoning_content"] = answer.thoughts
        if answer.calls:
            message["tool_calls"] = _render_calls(answer)
        choice = {"index": 0, "message": message, "finish_reason": _FINISH[answer.finish], "logprobs": None}
        return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _render_usage(answer)}

    def stream_answer(self, answer: ModelAnswer, request: AgentRequest) -> Iterator[bytes]:
        """The same as server-sent events, ``[DONE]`` included."""
        head = _head(answer, "chat.completion.chunk")

        def render_chunk(delta: Mapping[str, Any], finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return render_event({**head, "choices": [choice]})

        yield render_chunk({"role": "assistant", "content": ""})
        if answer.thoughts:
            yield render_chunk({"reasoning_content": answer.thoughts})
        if answer.text:
            yield render_chunk({"content": answer.text})
        for place, call in enumerate(_render_calls(answer)):
            yield render_chunk({"tool_calls": [{"index": place, **call}]})
        yield render_chunk({}, _FINISH[answer.finish])
        options = request.settings.get("stream_options")
        if isinstance(options, Mapping) and options.get("include_usage"):
            yield render_event({**head, "choices": [], "usage": _render_usage(answer)})
        yield b"data: [DONE]\n\n"

    def render_error(self, status: int, message: str) -> dict[str, Any]:
        """The body of an error."""
        return render_openai_error(status, message)

    def render_error_event(self, status: int, message: str) -> bytes:
        """The event of an error that ends a stream."""
        return render_event(render_openai_error(status, message))


def _read_messages(body: Mapping[str, Any], found: MessageList) -> tuple[AgentMessage, ...]:
    values = read_field(body, "messages", list)
    if not values and not found.num_items:
        raise RequestError("messages: missing or empty")
    for place, value in enumerate(values or (), found.num_items):
        where = f"messages[{place}]"
        message = read_object(value, where)
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            found.add_assistant(_read_assistant(message, where))
        elif role == "tool":
            call_id = read_field(message, "tool_call_id", str, f"{where}.") or ""
            found.add_result(call_id, read_content(content, f"{where}.content"))
        elif isinstance(role, str) and role in _ROLES:
            found.add(AgentMessage(_ROLES[role], read_content(content, f"{where}.content")))
        else:
            found_role = repr(role[:40]) if isinstance(role, str) else describe(role)
            raise RequestError(f"{where}.role: must be system, developer, user, assistant or tool, and is {found_role}")
        found.end_item()
    return found.messages()


def _read_assistant(message: Mapping[str, Any], where: str) -> AgentMessage:
    if message.get("audio"):
        raise RequestError(f"{where}.audio: audio is not supported")
    parts = read_content(message.get("content"), f"{where}.content") or read_content(
        message.get("refusal"), f"{where}.refusal"
    )
    thoughts = ""
    for name in ("reasoning_content", "reasoning"):
        thoughts = thoughts or read_text(message.get(name), f"{where}.{name}")
    calls = [
        _read_call(read_object(value, f"{where}.tool_calls[{place}]"), f"{where}.tool_calls[{place}].")
        for place, value in enumerate(read_field(message, "tool_calls", list, f"{where}.") or [])
    ]
    return AgentMessage(Role.ASSISTANT, parts, thoughts, tuple(calls))


def _read_call(call: Mapping[str, Any], where: str) -> ToolCall:
    call_id = read_field(call, "id", str, where) or ""
    custom = read_field(call, "custom", dict, where)
    if custom is not None:
        text = read_field(custom, "input", str, f"{where}custom.") or ""
        return ToolCall(read_name(custom, f"{where}custom."), text, call_id, is_text=True)
    function = read_object(call.get("function"), f"{where}function")
    arguments = read_arguments(function.get("arguments"), f"{where}function.arguments")
    return ToolCall(read_name(function, f"{where}function."), arguments, call_id)


def _read_tools(body: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], frozenset[str]]:
    """Functions and custom tools; others have no name that a model could call."""
    tools, text_tools = [], set()
    for place, value in enumerate(read_field(body, "tools", list) or []):
        where = f"tools[{place}]"
        tool = read_object(value, where)
        if tool.get("type", "function") == "function":
            tools.append(read_function(read_object(tool.get("function"), f"{where}.function"), f"{where}.function."))
        elif tool["type"] == "custom":
            tools.append(read_text_tool(read_object(tool.get("custom"), f"{where}.custom"), f"{where}.custom."))
            text_tools.add(tools[-1]["function"]["name"])
    return tuple(tools), frozenset(text_tools)


def _read_stop(value: object) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    stops = [stop for stop in values if isinstance(stop, str)]
    if len(stops) < len(values):
        raise RequestError("stop: must be a string or a list of strings")
    return tuple(stop for stop in stops if stop)


def _content(answer: ModelAnswer) -> str | None:
    """Null beside calls: the official API writes it so."""
    return answer.text if answer.text or not answer.calls else None


def _render_calls(answer: ModelAnswer) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for place, call in enumerate(answer.calls):
        call_id = call.id or f"call_{answer.id}_{place}"
        value = {"name": call.name, "input" if call.is_text else "arguments": call.arguments}
        kind = "custom" if call.is_text else "function"
        calls.append({"id": call_id, "type": kind, kind: value})
    return calls


def _render_usage(answer: ModelAnswer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def _head(answer: ModelAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}
