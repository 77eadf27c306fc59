"""A request of an agent and the model's answer, whatever API it speaks, and when two messages are the same.

Agents send the conversation again with each request, and change its form on the way: they serialise arguments anew, add
defaults of a schema, send text as parts, drop thoughts. `AgentMessage.digest` ignores what is form.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from verl_tool.content.parts import AudioPart, ImagePart, TextPart

_MAX_WHOLE = 2**53
ContentPart = TextPart | ImagePart | AudioPart


class Role(str, Enum):
    """Who a message is from."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Finish(str, Enum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended its turn, or wrote a stop string."""
    CALLS = "calls"
    """It calls tools."""
    LENGTH = "length"
    """A limit of tokens cut it."""


@dataclass(frozen=True)
class ToolCall:
    """One call in a turn of the model."""

    name: str
    arguments: str
    """A JSON object; of a custom tool (`is_text`) any text."""
    id: str = ""
    """Made by the gateway, and sent back by the agent."""
    is_text: bool = False
    native_id: str = ""
    """The id that the model itself wrote, where its format has one."""
    error: str | None = None
    """Why the call cannot be run, if the model wrote it wrongly; `arguments` is what it wrote then."""


@dataclass(frozen=True)
class AgentMessage:
    """One message of a conversation. All that a model writes in a turn is one message."""

    role: Role
    parts: tuple[ContentPart, ...] = ()
    thoughts: str = ""
    """Of an assistant: its reasoning as the agent sent it back; empty if it dropped it."""
    calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    answers: int | None = None
    """Of a tool: which call of the last assistant message it answers, from 0; None if that message has no such call."""
    is_error: bool = False
    """Of a tool: the agent marked the result as an error."""
    handles: tuple[str, ...] = ()
    """Of an assistant: ids and signatures that the gateway gave out with an answer, and that came back with it."""
    call_id: str = ""
    """Of a tool: the id of the call that it answers, which may belong to a turn that this request does not repeat."""

    @functools.cached_property
    def text(self) -> str:
        """The text of its parts."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    def digest(self, before: bytes, *, with_thoughts: bool) -> bytes:
        """Hash of the conversation up to this message; `before` is that of the messages before it. [16 bytes]

        Text of an assistant is compared without white space around it, arguments as parsed JSON. Ids are not compared.
        """
        from_model = self.role is Role.ASSISTANT
        fields: list[str] = [self.role.value, "" if self.answers is None else str(self.answers)]
        fields += [f"error={self.is_error}", self.thoughts.strip() if with_thoughts else ""]
        text = self.text
        fields.append(text.strip() if from_model else text)
        fields += [part.sha256 for part in self.parts if not isinstance(part, TextPart)]
        for call in self.calls:
            fields += [call.name, canonical_arguments(call.arguments)]
        return digest_of(before, fields)


@dataclass(frozen=True)
class AgentRequest:
    """What an agent asks of the model."""

    dialect: str
    messages: tuple[AgentMessage, ...]
    """At least one."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """As chat templates take them: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""
    text_tools: frozenset[str] = frozenset()
    """Names of those whose argument is text, not JSON (custom tools of the Responses API)."""
    deferred_tools: tuple[Mapping[str, Any], ...] = ()
    """In the same form: not in the prompt, since results describe them on demand; the model may call them all the same.
    """
    model: str = ""
    """The name that the agent gave; answers repeat it."""
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    agent_id: str = ""
    """What the agent's headers say of the sub-agent or thread that asks; empty for the main one."""
    previous: str | None = None
    """The answer that this request goes on from (``previous_response_id``); `messages` are those behind it."""
    instructions: str = ""
    """Of a request with `previous`: the system message at the start of the conversation. It is not in `messages`."""
    namespaces: Mapping[str, str] = field(default_factory=dict)
    """Of tools that the agent groups: the group by the name in `tools`. An answer names both."""
    can_be_continued: bool = False
    """A later request may name the answer to this one as `previous`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All other fields. Some are repeated in the answer; temperature, a forced tool choice and a schema of the answer
    have no effect."""


@dataclass(frozen=True)
class ModelAnswer:
    """A turn of the model, as an agent is to read it."""

    id: str
    """Unique; letters, digits and ``-`` only. Dialects put it behind their own prefix (``chatcmpl-``, ``msg_``)."""
    model: str
    text: str
    thoughts: str
    calls: tuple[ToolCall, ...]
    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    created: int
    """Seconds since the epoch."""
    stop_string: str | None = None
    """The one of the request's that ended it, which `text` does not hold."""

    @property
    def message(self) -> AgentMessage:
        """The answer as a message of the next request, sent back unchanged."""
        parts = (TextPart(self.text),) if self.text else ()
        return AgentMessage(Role.ASSISTANT, parts, self.thoughts, self.calls)


class MessageList:
    """Collects the messages of a request: consecutive pieces of an assistant become one message, and a tool's result
    finds its call by id."""

    def __init__(self) -> None:
        self._messages: list[AgentMessage] = []
        self._places: dict[str, int] = {}
        self._items: list[tuple[int, AgentMessage | None, dict[str, int]]] = []
        """Up to each item of the request: number of messages, the last one, and the places of its calls."""

    @property
    def num_items(self) -> int:
        """Items of the request that were read."""
        return len(self._items)

    def end_item(self) -> None:
        """An item of the request was read. It may have become any number of messages, or have joined the last one."""
        self._items.append((len(self._messages), self._messages[-1] if self._messages else None, self._places))

    def up_to(self, num_items: int) -> MessageList:
        """The list as it was when `num_items` items were read."""
        earlier = MessageList()
        if num_items:
            earlier._items = self._items[:num_items]
            count, last, earlier._places = earlier._items[-1]
            earlier._messages = self._messages[:count]
            if last is not None:  # a later item may have joined it
                earlier._messages[-1] = last
        return earlier

    def add(self, message: AgentMessage) -> None:
        """Append a message that is not an assistant's or a tool's."""
        self._messages.append(message)

    def add_assistant(self, message: AgentMessage, *, join: bool = False) -> None:
        """Append a piece of an assistant's turn. join: it belongs to the turn before it, if that is an assistant's."""
        last = self._messages[-1] if self._messages else None
        if join and last is not None and last.role is Role.ASSISTANT:
            message = AgentMessage(
                Role.ASSISTANT,
                last.parts + message.parts,
                last.thoughts + message.thoughts,
                last.calls + message.calls,
                handles=last.handles + message.handles,
            )
            self._messages.pop()
        self._messages.append(message)
        self._places = {call.id: place for place, call in enumerate(message.calls)}

    def add_result(self, call_id: str, parts: Sequence[ContentPart], *, is_error: bool = False) -> None:
        """Append what a tool answered."""
        answers = self._places.get(call_id)
        self._messages.append(
            AgentMessage(Role.TOOL, tuple(parts), answers=answers, is_error=is_error, call_id=call_id)
        )

    def messages(self) -> tuple[AgentMessage, ...]:
        """All of them, in order."""
        return tuple(self._messages)


def canonical_arguments(text: str) -> str:
    """`text` as JSON with sorted keys, without white space, and whole numbers as JavaScript writes them; trimmed
    if it is not JSON."""
    try:
        value = json.loads(text, parse_float=_parse_number)
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text.strip()


def _parse_number(digits: str) -> float | int:
    number = float(digits)
    return int(number) if number.is_integer() and abs(number) < _MAX_WHOLE else number


def digest_of(before: bytes, fields: Sequence[str]) -> bytes:
    """Hash of `before` and of `fields`, each with its length. [16 bytes]"""
    hashed = hashlib.blake2b(before, digest_size=16)
    for text in fields:
        data = text.encode("utf-8", "surrogatepass")
        hashed.update(len(data).to_bytes(8, "big") + data)
    return hashed.digest()
