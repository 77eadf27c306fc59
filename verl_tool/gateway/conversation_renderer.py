"""From the messages of an agent to token ids, by the model's own chat template.

A conversation without a recorded answer is rendered whole. Behind a recorded answer only what follows is rendered, so
that the answer stays the tokens that were sampled.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl_tool.agent_loop.observation import ControlTokens
from verl_tool.agent_loop.rendering.images import ImagePlacer
from verl_tool.agent_loop.rendering.template_text import MODEL_MARK, control_token_ids, count_written
from verl_tool.agent_loop.rendering.tool_messages import TemplateCalls, dummy_id, plain_name
from verl_tool.agent_loop.tokenizer import Tokenizer, render_prompt
from verl_tool.agent_loop.trajectory import Author, Segment
from verl_tool.content.parts import AudioPart, ImagePart, TextPart
from verl_tool.errors import ContentError
from verl_tool.formats import Format, rendered_markers
from verl_tool.gateway.conversation import AgentMessage, Role, ToolCall
from verl_tool.gateway.dialects.base import RequestError

_USER = {"role": "user", "content": "?"}
_SYSTEM_MARK = "SYSTEMWROTETHIS7f3a"
_MAX_CLOSING = 16
"""Tokens in which a template closes a turn."""


class ConversationRenderer(TemplateCalls):
    """Renders requests for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_token_ids: frozenset[int],
        formats: Sequence[Format],
        images: ImagePlacer | None = None,
    ) -> None:
        """end_token_ids: those that end the model's turn. formats: those in which it calls. images: None if the model
        reads text only."""
        super().__init__(tokenizer, formats)
        self._images = images
        self._end_token_ids = end_token_ids
        self._control = control_token_ids(tokenizer)
        self._escape = ControlTokens(tokenizer, allowed=rendered_markers(tuple(formats)))
        self.folds_system = not self._takes_late_system()
        """A system message behind the first message is given to the template as a user's."""

    def render_whole(self, messages: Sequence[AgentMessage], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids up to where the model's turn begins. [prompt_length] Raises RequestError if the template rejects
        the conversation."""
        try:
            return render_prompt(self._tokenizer, self._as_template(messages, ()), tools or None)
        except RequestError:
            raise
        except Exception as error:  # a template is a program, and raises what it likes
            raise RequestError(f"messages: the chat template rejects them: {error}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, for display."""
        return self._tokenizer.decode(list(tokens))

    def render_tail(self, sampled: Sequence[int], answer: AgentMessage, tail: Sequence[AgentMessage]) -> list[int]:
        """Token ids between `sampled`, the tokens of `answer`, and the model's next turn; `tail` are the messages
        between the two, at least one. Raises RequestError if the template rejects them."""
        messages = self._as_template(tail, answer.calls, late=True)
        try:
            text = self._behind_answer(answer, messages)
        except Exception as error:  # a template is a program, and raises what it likes
            raise RequestError(f"messages: the chat template rejects what follows an answer: {error}") from error
        ids = self._tokenizer.encode(text)
        written = count_written(sampled, ids[:_MAX_CLOSING], self._end_token_ids, self._control)
        return ids[written:]

    def place_images(self, rendered: Sequence[int], messages: Sequence[AgentMessage]) -> tuple[Segment, ...]:
        """`rendered` with the tokens of the messages' images, each a segment of its own; empty if there are none.
        Raises RequestError if the model does not take one, or the prompt has other places for images."""
        images = images_of(messages)
        if self._images is None:
            return ()
        try:
            for image in images:
                image.decode()  # a broken file is the agent's fault, and the engine would take it for its own
            self._images.check_prompt(rendered, images)
            placed = self._images.replace_placeholders([Segment(Author.TOOL, tuple(rendered))], images)
        except ContentError as error:
            raise RequestError(f"messages: {error}") from error
        return tuple(placed or ()) if images else ()

    def _behind_answer(self, answer: AgentMessage, messages: Sequence[Mapping[str, Any]]) -> str:
        """What the template writes behind an answer like `answer` that `messages` follow."""
        if answer.calls and self.found:
            made_up = {"role": "assistant", "content": "", "tool_calls": self._calls(answer.calls)}
            with contextlib.suppress(Exception):  # such as several calls, which Llama's rejects
                closed = self._render([_USER, made_up], False)
                last = self._last_call(closed)
                n = closed.count(last) if last else 0  # calls may be alike
                pieces = self._render([_USER, made_up, *messages], True).split(last or MODEL_MARK, n)
                if n and len(pieces) > n:
                    return pieces[-1]
        made_up = {"role": "assistant", "content": MODEL_MARK}
        _, found, behind = self._render([_USER, made_up, *messages], True).partition(MODEL_MARK)
        if not found:
            raise ValueError("it leaves out what the assistant wrote")
        return behind

    def _as_template(
        self, messages: Sequence[AgentMessage], calls: Sequence[ToolCall], *, late: bool = False
    ) -> list[dict[str, Any]]:
        """Messages as templates take them. calls: those of the assistant before the first message. late: other
        messages come before."""
        rendered: list[dict[str, Any]] = []
        for message in messages:
            role = message.role
            self._check_parts(message)
            if role is Role.ASSISTANT:
                calls = message.calls
                rendered.append(self._assistant_message(message))
                continue
            if role is Role.SYSTEM and self.folds_system and (late or rendered):
                role = Role.USER
            text = message.text if role is Role.SYSTEM else self._escaped(message)
            if role is Role.TOOL:
                place = message.answers or 0
                named = self._calls(calls)[place] if place < len(calls) else None
                name = named["function"]["name"] if named else "tool"
                call_id = named["id"] if named else dummy_id(place)
                rendered.append({"role": "tool", "content": text, "name": name, "tool_call_id": call_id})
            elif role is Role.USER and self.folds_system and rendered and rendered[-1]["role"] == "user":
                # A template that rejects a late system message may reject two user messages in a row, too.
                rendered[-1]["content"] += f"\n\n{text}"
            else:
                rendered.append({"role": role.value, "content": text})
        return rendered

    def _check_parts(self, message: AgentMessage) -> None:
        other = [part for part in message.parts if not isinstance(part, TextPart)]
        if self._images is None or any(not isinstance(part, ImagePart) for part in other):
            if other:
                reads = "text only" if self._images is None else "text and images only"
                raise RequestError(f"messages: an image or audio, and the model reads {reads}; leave it out")
        elif other and message.role not in (Role.USER, Role.TOOL):
            raise RequestError(f"messages: an image from {message.role.value}; send those of a user and of tools only")

    def _escaped(self, message: AgentMessage) -> str:
        """The text, with the model's placeholder for each image."""
        if self._images is None or all(isinstance(part, TextPart) for part in message.parts):
            return next(self._escape.escaped_forms(message.text))
        texts = [next(self._escape.escaped_forms(p.text)) if isinstance(p, TextPart) else p for p in message.parts]
        return self._images.text_of([each for each in texts if not isinstance(each, AudioPart)])

    def _assistant_message(self, message: AgentMessage) -> dict[str, Any]:
        rendered: dict[str, Any] = {"role": "assistant", "content": message.text}
        if message.thoughts:
            rendered["reasoning_content"] = message.thoughts
        if message.calls:
            rendered["tool_calls"] = self._calls(message.calls, with_arguments=True)
        return rendered

    def _calls(self, calls: Sequence[ToolCall], *, with_arguments: bool = False) -> list[dict[str, Any]]:
        listed = []
        for number, call in enumerate(calls):
            arguments: Any = {}
            if with_arguments:
                arguments = {"input": call.arguments} if call.is_text else _object(call.arguments)
            if isinstance(self._arguments, str):  # some templates take the JSON of an object
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": plain_name(call.name), "arguments": arguments}
            call_id = plain_name(call.native_id) or dummy_id(number)
            listed.append({"id": call_id, "type": "function", "function": function})
        return listed

    def _takes_late_system(self) -> bool:
        """Whether the template writes a system message behind a user's where it stands."""
        late, answer = {"role": "system", "content": _SYSTEM_MARK}, {"role": "assistant", "content": MODEL_MARK}
        try:
            behind = self._render([_USER, answer, late, _USER], True)
            before = self._render([_USER, late, answer, _USER], True)
        except Exception:  # noqa: BLE001 - a template is a program, and raises what it likes
            return False
        return 0 <= behind.find(MODEL_MARK) < behind.find(_SYSTEM_MARK) and before.find(_SYSTEM_MARK) > 0


def images_of(messages: Sequence[AgentMessage]) -> list[ImagePart]:
    """The images of a conversation, in order."""
    return [part for message in messages for part in message.parts if isinstance(part, ImagePart)]


def _object(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {"input": arguments}
    return value if isinstance(value, dict) else {"input": arguments}
