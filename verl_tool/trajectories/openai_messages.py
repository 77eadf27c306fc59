"""OpenAI's messages: ``{"messages": [...]}``, the form of fine-tuning files and of most data sets of agents."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from verl_tool.agent_loop.trajectory import Author, CallRecord, Segment, Trajectory
from verl_tool.trajectories.turns import Converted, Json, Turn, foreign, prompt_text, turns_of, validated

PROMPT_MESSAGES = "prompt_messages"
"""Entry of `Trajectory.extra`: the messages of a prompt that was read from such a form."""
LOST = ("tokens, log-probabilities and masks", "rewards, faults, times, how it ended", "how calls are written")
_END_TOKEN = re.compile(r"(<\|[\w-]+\|>|</s>|<end_of_turn>|<｜[^｜]+｜>)\s*$")


class _Function(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str | Json = ""


class _ToolCall(BaseModel):
    model_config = ConfigDict(extra="ignore")

    function: _Function


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Json] | None = None
    tool_calls: list[_ToolCall] | None = None


class _Conversation(BaseModel):
    model_config = ConfigDict(extra="ignore")

    messages: list[_Message]


def write(trajectory: Trajectory, prompt: Sequence[Json] | None = None) -> Converted:
    """The conversation. `prompt`: the messages of the row; without them the rendered prompt is one of the user's."""
    lost = list(LOST)
    own = prompt if prompt is not None else trajectory.extra.get(PROMPT_MESSAGES)
    if own is None:
        own = [{"role": "user", "content": prompt_text(trajectory)}]
        lost.append("messages of the prompt (its rendered text is one message; --data FILE brings them)")
    messages: list[Json] = [dict(message) for message in own]
    count = 0
    for turn in turns_of(trajectory):
        messages += _messages(turn, count)
        count += len(turn.calls)
    return Converted({"messages": messages}, tuple(lost))


def read(document: Any) -> Converted:
    """A trajectory of texts alone. A call is written in the form of Hermes. Raises ConfigError."""
    messages = validated(_Conversation, document, "these are no messages of OpenAI's form").messages
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
    segments = [Segment(Author.PROMPT, (), text=_text(message)) for message in messages[:first]]
    calls: list[CallRecord] = []
    for message in messages[first:]:
        if message.role != "assistant":
            segments.append(Segment(Author.TOOL, (), text=_text(message)))
            if calls and message.role in ("tool", "function"):
                calls[-1] = _answered(calls[-1], _text(message))
            continue
        text = _text(message) + "".join(map(_written, message.tool_calls or ()))
        segments.append(Segment(Author.MODEL, (), text=text))
        if message.tool_calls:
            names = tuple(dict.fromkeys(call.function.name for call in message.tool_calls))
            calls.append(CallRecord(len(calls), text, names=names))
    prompt = [message.model_dump(exclude_none=True) for message in messages[:first]]
    made = foreign("messages", segments, max(first, 1), calls, extra={PROMPT_MESSAGES: prompt})
    return Converted(made, ("tokens, log-probabilities and masks (texts alone)", "ids of calls"))


def _messages(turn: Turn, count: int) -> list[Json]:
    text = _END_TOKEN.sub("", turn.text_without_calls)
    if not turn.calls:
        observed = [{"role": "user", "content": turn.observation}] if turn.observation else []
        return [{"role": "assistant", "content": text}, *observed]
    ids = [f"call_{count + i}" for i in range(len(turn.calls))]
    calls = [
        {
            "id": name,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(json.loads(call.arguments), ensure_ascii=False)},
        }
        for name, call in zip(ids, turn.calls, strict=True)
    ]
    # Several calls are answered by one observation, and each needs a message.
    answers = [turn.observation, *[""] * (len(ids) - 1)]
    answered = [
        {"role": "tool", "tool_call_id": name, "content": each} for name, each in zip(ids, answers, strict=True)
    ]
    return [{"role": "assistant", "content": text, "tool_calls": calls}, *answered]


def _written(call: _ToolCall) -> str:
    written = call.function.arguments
    try:
        arguments = json.loads(written or "{}") if isinstance(written, str) else written
    except ValueError:
        arguments = {"input": written}
    body = json.dumps({"name": call.function.name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _answered(call: CallRecord, text: str) -> CallRecord:
    return CallRecord(call.step, call.action, call.observation + text, names=call.names)


def _text(message: _Message) -> str:
    content = message.content
    if isinstance(content, list):
        return "".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    return content or ""
