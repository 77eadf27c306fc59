"""The Responses API of OpenAI: Codex, and agents made with its SDKs.

A turn of the model is several items here: reasoning, a message, calls. Their ids, and ``encrypted_content``, name the
answer that they are of: `AgentMessage.handles` has its id again when they come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
_READ = frozenset(["input", "instructions", "tools", "model", "stream", "max_output_tokens", "previous_response_id"])
"""Fields that are not recorded as settings."""
_ECHOED = {"parallel_tool_calls": True, "tool_choice": "auto", "metadata": {}, "temperature": 1.0, "top_p": 1.0}
"""Settings that an answer repeats, and what stands for those that are absent or null."""


class ResponsesDialect:
    """``/v1/responses``."""

    name = "responses"
    path = "/v1/responses"
    history_field = "input"
    ping = b": ping\n\n"

    def parse_request(
        self, body: Mapping[str, Any], headers: Mapping[str, str], found: MessageList | None = None
    ) -> AgentRequest:
        """Read a request. Raises RequestError that names the field."""
        tools = _Tools()
        tools.read(read_field(body, "tools", list) or [], "tools")
        previous = read_field(body, "previous_response_id", str) or None
        instructions = read_field(body, "instructions", str) or ""
        return AgentRequest(
            dialect=self.name,
            messages=_read_input(
                body.get("input"), "" if previous else instructions, tools, MessageList() if found is None else found
            ),
            tools=tuple(tools.functions),
            text_tools=frozenset(tools.text_tools),
            model=read_field(body, "model", str) or "",
            stream=read_field(body, "stream", bool) or False,
            max_tokens=read_limit(body, "max_output_tokens"),
            agent_id=read_agent_id(headers),
            previous=_answer_id(previous) if previous else None,
            can_be_continued=body.get("store") is not False,
            instructions=instructions if previous else "",
            namespaces=tools.namespaces,
            settings={name: value for name, value in body.items() if name not in _READ},
        )

    def render_answer(self, answer: ModelAnswer, request: AgentRequest) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        cut = answer.finish is Finish.LENGTH
        return {
            **_render_head(answer, request),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _render_items(answer, request),
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": answer.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        }

    def stream_answer(self, answer: ModelAnswer, request: AgentRequest) -> Iterator[bytes]:
        """The same as server-sent events, numbered; the last one has the whole body."""
        whole = self.render_answer(answer, request)
        opened = {**_render_head(answer, request), "status": "in_progress", "output": [], "usage": None}
        events: list[dict[str, Any]] = [{"type": f"response.{kind}", "response": opened} for kind in _BEGINNING]
        for place, item in enumerate(whole["output"]):
            events += _item_events(item, place)
        events.append({"type": f"response.{whole['status']}", "response": whole})
        for number, event in enumerate(events):
            yield render_event({**event, "sequence_number": number}, event["type"])

    def render_error(self, status: int, message: str) -> dict[str, Any]:
        """The body of an error."""
        return render_openai_error(status, message)

    def render_error_event(self, status: int, message: str) -> bytes:
        """The event of an error that ends a stream."""
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        failed = {"object": "response", "status": "failed", "error": {"code": code, "message": message}, "output": []}
        event: dict[str, Any] = {"type": "response.failed", "response": failed, "sequence_number": 0}
        return render_event(event, event["type"])


_BEGINNING = ("created", "in_progress")


@dataclass
class _Tools:
    """Tools of a request, under names that differ."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    text_tools: set[str] = field(default_factory=set)
    namespaces: dict[str, str] = field(default_factory=dict)

    def read(self, values: list[Any], where: str, namespace: str = "") -> None:
        """Add these, groups last: their names give way. Tools that a server runs are skipped: no model calls them."""
        tools = [(read_object(value, f"{where}[{place}]"), f"{where}[{place}].") for place, value in enumerate(values)]
        for tool, at in sorted(tools, key=lambda pair: pair[0].get("type") == "namespace"):
            kind = tool.get("type", "function")
            if kind == "namespace":
                if namespace:
                    raise RequestError(f"{at}type: a namespace in a namespace is not supported")
                self.read(read_field(tool, "tools", list, at) or [], f"{at}tools", read_name(tool, at))
            elif kind in ("function", "custom"):
                name = self._add_name(read_name(tool, at), namespace)
                read = read_text_tool if kind == "custom" else read_function
                self.functions.append(read(tool, at, name))
                if kind == "custom":
                    self.text_tools.add(name)

    def name_of(self, name: str, namespace: str) -> str:
        """Under which name the model knows a tool."""
        qualified = f"{namespace}__{name}"
        return qualified if namespace and self.namespaces.get(qualified) == namespace else name

    def _add_name(self, name: str, namespace: str) -> str:
        if namespace:
            if any(tool["function"]["name"] == name for tool in self.functions):
                name = f"{namespace}__{name}"
            self.namespaces[name] = namespace
        return name


def _read_input(value: object, instructions: str, tools: _Tools, found: MessageList) -> tuple[AgentMessage, ...]:
    system = AgentMessage(Role.SYSTEM, read_content(instructions, "instructions"))
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if value is not None and not isinstance(value, list):
        raise RequestError(f"input: must be a string or a list of items, and is {describe(value)}")
    for place, each in enumerate(value or [], found.num_items):
        _read_item(read_object(each, f"input[{place}]"), f"input[{place}].", found, tools)
        found.end_item()
    messages = (system, *found.messages()) if instructions else found.messages()
    if not messages:
        raise RequestError("input: missing or empty")
    return messages


def _read_item(item: Mapping[str, Any], where: str, found: MessageList, tools: _Tools) -> None:
    kind = read_field(item, "type", str, where) or "message"
    if kind == "reasoning":
        text = read_text(item.get("content"), f"{where}content") or read_text(item.get("summary"), f"{where}summary")
        found.add_assistant(AgentMessage(Role.ASSISTANT, (), text, handles=_handles(item, where)), join=True)
    elif kind in ("function_call", "custom_tool_call"):
        call = _read_call(item, where, tools, is_text=kind == "custom_tool_call")
        found.add_assistant(AgentMessage(Role.ASSISTANT, calls=(call,), handles=_handles(item, where)), join=True)
    elif kind.endswith("_output"):
        call_id = read_field(item, "call_id", str, where) or ""
        found.add_result(call_id, read_content(item.get("output"), f"{where}output"))
    elif kind == "message":
        role, parts = item.get("role"), read_content(item.get("content"), f"{where}content")
        if role == "assistant":
            found.add_assistant(AgentMessage(Role.ASSISTANT, parts, handles=_handles(item, where)), join=True)
        elif isinstance(role, str) and role in _ROLES:
            found.add(AgentMessage(_ROLES[role], parts))
        else:
            found_role = repr(role[:40]) if isinstance(role, str) else describe(role)
            raise RequestError(f"{where}role: must be system, developer, user or assistant, and is {found_role}")
    elif not kind.endswith("_call"):  # calls of tools that another server ran have nothing that the model wrote
        raise RequestError(f"{where}type: {kind[:40]!r} is not supported; send messages, calls and their outputs whole")


def _read_call(item: Mapping[str, Any], where: str, tools: _Tools, *, is_text: bool) -> ToolCall:
    name = tools.name_of(read_name(item, where), read_field(item, "namespace", str, where) or "")
    call_id = read_field(item, "call_id", str, where) or ""
    if is_text:
        return ToolCall(name, read_field(item, "input", str, where) or "", call_id, is_text=True)
    return ToolCall(name, read_arguments(item.get("arguments"), f"{where}arguments"), call_id)


def _handles(item: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Ids of the answers that an item's id and its ``encrypted_content`` name."""
    names = (read_field(item, name, str, where) for name in ("id", "encrypted_content"))
    return tuple(dict.fromkeys(_answer_id(name) for name in names if name))


def _answer_id(name: str) -> str:
    """The answer's id in a name made here, such as ``fc_ID_0``."""
    pieces = name.split("_")
    return pieces[1] if len(pieces) > 1 else name


def _render_head(answer: ModelAnswer, request: AgentRequest) -> dict[str, Any]:
    settings = request.settings
    echoed = {name: default if settings.get(name) is None else settings[name] for name, default in _ECHOED.items()}
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "previous_response_id": f"resp_{request.previous}" if request.previous else None,
        "max_output_tokens": request.max_tokens,
        "tools": [],
        **echoed,
    }


def _render_items(answer: ModelAnswer, request: AgentRequest) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.thoughts:
        summary = [{"type": "summary_text", "text": answer.thoughts}]
        names = {"id": f"rs_{answer.id}", "encrypted_content": f"enc_{answer.id}"}
        items.append({"type": "reasoning", **names, "summary": summary})
    if answer.text or not answer.calls:
        content = [{"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}]
        head = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": content})
    for place, call in enumerate(answer.calls):
        namespace = request.namespaces.get(call.name, "")
        item: dict[str, Any] = {
            "type": "custom_tool_call" if call.is_text else "function_call",
            "id": f"{'ctc' if call.is_text else 'fc'}_{answer.id}_{place}",
            "call_id": call.id or f"call_{answer.id}_{place}",
            "name": call.name.removeprefix(f"{namespace}__") if namespace else call.name,
            "status": "completed",
            "input" if call.is_text else "arguments": call.arguments,
        }
        items.append({**item, "namespace": namespace} if namespace else item)
    if answer.finish is Finish.LENGTH and items[-1]["type"] != "reasoning":
        items[-1]["status"] = "incomplete"
    return items


def _item_events(item: dict[str, Any], place: int) -> list[dict[str, Any]]:
    """Events of one item: it opens empty, is filled, and ends whole."""
    at = {"item_id": item["id"], "output_index": place}
    if item["type"] == "reasoning":
        empty: dict[str, Any] = {"summary": []}
        filled = _part_events("reasoning_summary_part", "reasoning_summary_text", item["summary"][0], at, "summary")
    elif item["type"] == "message":
        empty = {"content": []}
        filled = _part_events("content_part", "output_text", item["content"][0], at, "content")
    else:
        name = "input" if item["type"] == "custom_tool_call" else "arguments"
        kind = "response.custom_tool_call_input" if name == "input" else "response.function_call_arguments"
        empty = {name: ""}
        done = {name: item[name]} | ({} if name == "input" else {"name": item["name"]})
        filled = [{"type": f"{kind}.delta", "delta": item[name], **at}, {"type": f"{kind}.done", **done, **at}]
    opened = {**item, **empty, **({"status": "in_progress"} if "status" in item else {})}
    added = {"type": "response.output_item.added", "output_index": place, "item": opened}
    return [added, *filled, {"type": "response.output_item.done", "output_index": place, "item": item}]


def _part_events(
    part_kind: str, text_kind: str, part: dict[str, Any], at: dict[str, Any], index: str
) -> list[dict[str, Any]]:
    at = {**at, f"{index}_index": 0}
    extra: dict[str, Any] = {"logprobs": []} if text_kind == "output_text" else {}
    deltas = [{"type": f"response.{text_kind}.delta", "delta": part["text"], **extra, **at}] if part["text"] else []
    return [
        {"type": f"response.{part_kind}.added", "part": {**part, "text": ""}, **at},
        *deltas,
        {"type": f"response.{text_kind}.done", "text": part["text"], **extra, **at},
        {"type": f"response.{part_kind}.done", "part": part, **at},
    ]
