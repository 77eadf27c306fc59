"""Render observations as messages of the role ``tool``, with the model's chat template.

The template renders a dummy conversation: a user's message, the calls of the action with their names and ids, and a
message for each output. The text after the calls is appended to the model's tokens. So the names and ids are those of
the model's calls, and every other token between two of its turns comes from the template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_tool.agent_loop.rendering.template_text import (
    MODEL_MARK,
    TOOL_MARK,
    closing_token,
    common_prefix,
    control_token_ids,
    count_written,
    generation_prompt,
    without_suffix,
)
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.trajectory import Author, Segment
from verl_tool.errors import ConfigError
from verl_tool.formats import Call, Format
from verl_tool.formats.find import find_calls
from verl_tool.formats.tool_response import outputs

ROLE = "tool"
_USER = {"role": "user", "content": "?"}
_SAMPLE_REPLY = {"role": "assistant", "content": MODEL_MARK}
_UNNAMED = "tool"
"""Name of a call that could not be parsed."""
_NOT_PLAIN = re.compile(r"[^\w.:/-]")
"""Characters that are removed from names and ids before rendering, since the model wrote them."""
_MAX_NAME = 200
_MAX_SHAPES = 1000
"""Maximum number of cached shapes."""


@dataclass(frozen=True)
class _Calls:
    """The calls of an action, as passed to the template."""

    names: tuple[str, ...]
    ids: tuple[str, ...]

    @classmethod
    def dummy(cls, n: int) -> _Calls:
        return cls((_UNNAMED,) * n, tuple(map(dummy_id, range(n))))


@dataclass(frozen=True)
class _Shape:
    """The text that a template writes around the answers to some calls."""

    messages: tuple[Mapping[str, Any], ...]
    """The dummy conversation up to the answers."""
    head: int
    """Number of rendered characters up to the end of the calls."""
    fixed: tuple[str, ...]
    """The texts before the first answer, between two answers, and after the last answer."""


class TemplateCalls:
    """Finds out whether a chat template writes calls in one of the model's formats."""

    def __init__(self, tokenizer: Tokenizer, formats: Sequence[Format]) -> None:
        self._tokenizer, self._formats = tokenizer, tuple(formats)
        self._opening = generation_prompt(tokenizer)
        self._arguments: object = {}
        self.found = self._finds_calls_of_the_template()
        """Whether one of the formats finds the template's calls."""

    def _assistant(self, calls: _Calls) -> dict[str, Any]:
        """Return an assistant's message with `calls`."""
        listed = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": self._arguments}}
            for name, call_id in zip(calls.names, calls.ids, strict=True)
        ]
        return {"role": "assistant", "content": "", "tool_calls": listed}

    def _last_call(self, closed: str) -> str | None:
        """Return the text of the last call in a rendered assistant's turn, or None if no format finds one."""
        start = common_prefix(closed, self._render([_USER], False))
        if self._opening and self._opening in closed[start:]:
            start = closed.index(self._opening, start) + len(self._opening)
        found = find_calls(closed[start:], self._formats)
        return closed[start + found[-1].start : start + found[-1].end] if found else None

    def _finds_calls_of_the_template(self) -> bool:
        """Return whether one of the formats finds the calls that the template writes."""
        for self._arguments in ({}, "{}"):  # some templates take an object, some its JSON
            try:
                closed = self._render([_USER, self._assistant(_Calls.dummy(1))], False)
            except Exception:  # noqa: BLE001 - a template is a program, and raises what it likes
                continue
            return self._last_call(closed) is not None
        return False

    def _render(self, messages: Sequence[Mapping[str, Any]], generation: bool) -> str:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=generation)


class ToolMessageRenderer(TemplateCalls):
    """Renders each output of an observation as a message of the role ``tool``."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_token_ids: frozenset[int],
        formats: Sequence[Format],
        turn_end_token: str | None = None,
    ) -> None:
        """`formats` are those in which the model calls. Raises ConfigError if the template has no tool messages."""
        super().__init__(tokenizer, formats)
        self.tokenizer, self.turn_end_token = tokenizer, turn_end_token
        self.end_token_ids = end_token_ids
        self._shapes: dict[_Calls, _Shape | None] = {}
        self._control = control_token_ids(tokenizer)
        before = self._probe().fixed[0]
        if turn_end_token is not None and turn_end_token not in before:
            raise ConfigError(
                f"turn_end_token={turn_end_token!r}, but the chat template writes {before!r} between a call and its "
                "answer; leave turn_end_token out, or set mtrl_sep"
            )
        if turn_end_token is None:
            self.end_token_ids |= closing_token(
                tokenizer, self._render([_USER, _SAMPLE_REPLY], False).partition(MODEL_MARK)[2]
            )

    def parts(self, observation: str) -> list[str]:
        """Split an observation into its outputs. An observation without rendered outputs is one output."""
        return outputs(observation) or [observation]

    def first(self, prompt: Sequence[int], observation: str) -> list[Segment]:
        """Return the prompt with an observation that comes before the model's first turn. Raises ConfigError if the
        template does not accept a tool message without a call."""
        stored = without_suffix(tuple(prompt), tuple(self._tokenizer.encode(self._opening)))
        output = "\n".join(self.parts(observation))
        try:
            before, mark, after = self._render_after_user(TOOL_MARK).partition(TOOL_MARK)
            text = self._render_after_user(output)
        except Exception as error:  # a template is a program, and raises what it likes
            raise ConfigError(
                f"call_tool_first: the chat template takes no turn of role {ROLE!r} without a call: {error}; set "
                "another mtrl_role, or mtrl_sep"
            ) from error
        if not mark:
            raise ConfigError(
                f"call_tool_first: the chat template leaves out a turn of role {ROLE!r} without a call; set another "
                "mtrl_role, or mtrl_sep"
            )
        own = Segment(Author.PROMPT, stored, text=self._tokenizer.decode(stored))
        return [own, *self._segments((), "", (before, after), text, [output])]

    def next(self, context: Sequence[int], parts: Sequence[str], calls: Sequence[Call]) -> list[Segment]:
        """Return the segments to append after the model's turn, which contains `calls`."""
        found = calls if self.found else ()
        named, visible = _name_calls(found, len(parts)), list(parts)
        shape = self._shape(named)
        if shape is None:  # the template does not accept an id, for example
            named = _Calls.dummy(len(parts))
            shape = self._shape(named)
        if shape is None:  # Llama's template does not accept several calls, for example
            named, visible = _Calls.dummy(1), ["\n".join(parts)]
            shape = self._shape(named)
        assert shape is not None  # __init__ has rendered this shape
        missing = found[-1].missing if found else ""
        text = self._render([*shape.messages, *_answers(named, visible)], True)[shape.head :]
        return self._segments(context, missing, shape.fixed, text, visible)

    # What the template writes

    def _render_after_user(self, output: str) -> str:
        whole = self._render([_USER, {"role": ROLE, "content": output}], True)
        return whole[common_prefix(whole, self._render([_USER], False)) :]

    def _shape(self, calls: _Calls) -> _Shape | None:
        """Return the shape of `calls` from the cache, or None if the template does not accept them."""
        if calls not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            try:
                self._shapes[calls] = self._new_shape(calls)
            except Exception:  # noqa: BLE001 - a template is a program, and raises what it likes
                self._shapes[calls] = None
        return self._shapes[calls]

    def _new_shape(self, calls: _Calls) -> _Shape:
        """Render `calls` with dummy answers. Raises ConfigError if the template leaves out an answer or the turn before
        it, and whatever the template raises."""
        contents = [f"{TOOL_MARK}{number}e" for number in range(len(calls.names))]
        answers = _answers(calls, contents)
        messages = (_USER, self._assistant(calls) if self.found else _SAMPLE_REPLY)
        whole = self._render([*messages, *answers], True)
        for content in contents:
            if whole.count(content) != 1:
                raise ConfigError(
                    f"the chat template writes a turn of role {ROLE!r} {whole.count(content)} times; it must write it "
                    "once: set another mtrl_role, or mtrl_sep"
                )
        # If an answer follows, a template may render the turn differently (Qwen3 adds thoughts to the last turn), but
        # not its calls.
        last_call = self._last_call(self._render(messages, False)) if self.found else MODEL_MARK
        head = whole.rfind(last_call or "", 0, whole.find(contents[0])) + len(last_call or "")
        if not last_call or last_call not in whole[:head]:
            raise ConfigError("the chat template leaves out what the assistant wrote; set mtrl_sep to render turns")
        fixed: list[str] = []
        text = whole[head:]
        for content in contents:
            before, _, text = text.partition(content)
            fixed.append(before)
        return _Shape(messages, head, (*fixed, text))

    def _probe(self) -> _Shape:
        """Return the shape of one answer. Raises ConfigError if the template does not accept tool messages."""
        try:
            return self._new_shape(_Calls.dummy(1))
        except ConfigError:
            raise
        except Exception as error:  # a template is a program, and raises what it likes
            raise ConfigError(
                f"the chat template refuses a turn of role {ROLE!r} behind the model's: {error}; "
                "set another mtrl_role, or mtrl_sep"
            ) from error

    # What is appended

    def _segments(
        self, context: Sequence[int], missing: str, fixed: Sequence[str], text: str, visible: Sequence[str]
    ) -> list[Segment]:
        """Split `text`, which follows the calls, into segments. `missing` is the end of the last call that the engine
        cut off."""
        encode = self._tokenizer.encode
        ids, after = encode(missing + text), encode(fixed[-1])
        n_before = common_prefix(ids, encode(missing + fixed[0]))
        # A token that spans template and output counts as the output's.
        n_after = common_prefix(ids[n_before:][::-1], after[::-1])
        end = len(ids) - n_after
        written = count_written(context, ids[:n_before], self.end_token_ids, self._control)
        segments = [
            _template(ids[written:n_before], self._tokenizer),
            *_outputs(ids[n_before:end], [encode(each) for each in fixed[1:-1]], visible, self._tokenizer),
            _template(ids[end:], self._tokenizer),
        ]
        return [segment for segment in segments if segment.tokens]


def _name_calls(found: Sequence[Call], n: int) -> _Calls:
    """Return the names and ids of the first `n` calls of an action, filled up with dummy calls."""
    dummy = _Calls.dummy(n)
    names = [plain_name(call.name) or _UNNAMED for call in found[:n]]
    ids = [plain_name(call.id or "") or dummy.ids[number] for number, call in enumerate(found[:n])]
    return _Calls((*names, *dummy.names[len(names) :]), (*ids, *dummy.ids[len(ids) :]))


def plain_name(text: str) -> str:
    """`text` without what a template must not be shown in a name or an id."""
    return _NOT_PLAIN.sub("_", text[:_MAX_NAME])


def dummy_id(number: int) -> str:
    """Return an id for a call without one: nine letters and digits, as Mistral's templates require."""
    return f"call{number % 100_000:05d}"


def _answers(calls: _Calls, contents: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"role": ROLE, "content": content, "name": name, "tool_call_id": call_id}
        for content, name, call_id in zip(contents, calls.names, calls.ids, strict=True)
    ]


def _template(ids: Sequence[int], tokenizer: Tokenizer) -> Segment:
    return Segment(Author.TEMPLATE, tuple(ids), text=tokenizer.decode(ids))


def _outputs(
    ids: Sequence[int], between: Sequence[Sequence[int]], visible: Sequence[str], tokenizer: Tokenizer
) -> list[Segment]:
    """Split `ids` into outputs and the template's tokens `between` them."""
    segments: list[Segment] = []
    rest = list(ids)
    for output, separator in zip(visible, between, strict=False):
        place = _place(rest, separator)
        if place is None:
            break
        start, end = place
        segments += [Segment(Author.TOOL, tuple(rest[:start]), text=output), _template(rest[start:end], tokenizer)]
        rest = rest[end:]
    left = visible[len(segments) // 2 :]
    return [*segments, Segment(Author.TOOL, tuple(rest), text="\n".join(left))]


def _place(ids: Sequence[int], separator: Sequence[int]) -> tuple[int, int] | None:
    """Find `separator` in `ids`, possibly without its first or last token, which may have merged with an output's."""
    for core in (separator, separator[1:], separator[:-1], separator[1:-1]):
        n = len(core)
        for start in range(len(ids) - n + 1) if n else ():
            if ids[start] == core[0] and list(ids[start : start + n]) == list(core):
                return start, start + n
    return None
