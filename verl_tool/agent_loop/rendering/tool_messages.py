"""Observations as messages of the role ``tool``, which the model's own chat template renders.

The template is given a made-up conversation: a user's message, the calls of the action with their names and ids, and a
message for each output. What stands behind the calls is appended to what the model wrote, so that the names and ids are
those of the model's own calls, and every token between two of its turns is the template's.
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
"""The name of a call that has none, because it could not be read."""
_NOT_PLAIN = re.compile(r"[^\w.:/-]")
"""What a name or an id may not hold when it is shown to a template: it is a model's text."""
_MAX_NAME = 200
_MAX_SHAPES = 1000
"""How many are remembered."""


@dataclass(frozen=True)
class _Calls:
    """The calls of an action, as the template is told of them."""

    names: tuple[str, ...]
    ids: tuple[str, ...]

    @classmethod
    def made_up(cls, n: int) -> _Calls:
        return cls((_UNNAMED,) * n, tuple(map(made_up_id, range(n))))


@dataclass(frozen=True)
class _Shape:
    """What a template writes around the answers to some calls."""

    messages: tuple[Mapping[str, Any], ...]
    """The made-up conversation up to the answers."""
    head: int
    """Characters of it up to the end of the calls."""
    fixed: tuple[str, ...]
    """The text before the first answer, those between two, and that behind the last."""


class TemplateCalls:
    """The calls that a chat template writes, and whether the model's formats are of that kind."""

    def __init__(self, tokenizer: Tokenizer, formats: Sequence[Format]) -> None:
        self._tokenizer, self._formats = tokenizer, tuple(formats)
        self._opening = generation_prompt(tokenizer)
        self._arguments: object = {}
        self.found = self._finds_calls_of_the_template()
        """One of the formats finds them."""

    def _assistant(self, calls: _Calls) -> dict[str, Any]:
        """The made-up message with `calls`."""
        listed = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": self._arguments}}
            for name, call_id in zip(calls.names, calls.ids, strict=True)
        ]
        return {"role": "assistant", "content": "", "tool_calls": listed}

    def _last_call(self, closed: str) -> str | None:
        """The text of the last call in a rendered assistant's turn; None if no format finds one."""
        start = common_prefix(closed, self._render([_USER], False))
        if self._opening and self._opening in closed[start:]:
            start = closed.index(self._opening, start) + len(self._opening)
        found = find_calls(closed[start:], self._formats)
        return closed[start + found[-1].start : start + found[-1].end] if found else None

    def _finds_calls_of_the_template(self) -> bool:
        """Whether one of the formats finds the calls that the template writes: then it is told of them."""
        for self._arguments in ({}, "{}"):  # some templates take an object, some its JSON
            try:
                closed = self._render([_USER, self._assistant(_Calls.made_up(1))], False)
            except Exception:  # noqa: BLE001 - a template is a program, and raises what it likes
                continue
            return self._last_call(closed) is not None
        return False

    def _render(self, messages: Sequence[Mapping[str, Any]], generation: bool) -> str:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=generation)


class ToolMessageRenderer(TemplateCalls):
    """Each output of an observation is a message of the role ``tool``."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_token_ids: frozenset[int],
        formats: Sequence[Format],
        turn_end_token: str | None = None,
    ) -> None:
        """`formats`: those in which the model calls. Raises ConfigError if the template takes no such message."""
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
        """The outputs that an observation holds; one that is not rendered as such is one output."""
        return outputs(observation) or [observation]

    def first(self, prompt: Sequence[int], observation: str) -> list[Segment]:
        """The prompt with an observation that comes before the model's first turn. Raises ConfigError if the template
        takes no tool's message without a call before it."""
        stored = without_suffix(tuple(prompt), tuple(self._tokenizer.encode(self._opening)))
        output = "\n".join(self.parts(observation))
        try:
            before, mark, after = self._behind_the_user(TOOL_MARK).partition(TOOL_MARK)
            text = self._behind_the_user(output)
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
        """The segments to append behind the model's turn, in which it wrote `calls`."""
        found = calls if self.found else ()
        description, visible = _named(found, len(parts)), list(parts)
        shape = self._shape(description)
        if shape is None:  # such as an id that the template does not take
            description = _Calls.made_up(len(parts))
            shape = self._shape(description)
        if shape is None:  # such as several calls, which Llama's refuses
            description, visible = _Calls.made_up(1), ["\n".join(parts)]
            shape = self._shape(description)
        assert shape is not None  # it is the one that was tried when the renderer was made
        missing = found[-1].missing if found else ""
        text = self._render([*shape.messages, *_answers(description, visible)], True)[shape.head :]
        return self._segments(context, missing, shape.fixed, text, visible)

    # What the template writes

    def _behind_the_user(self, output: str) -> str:
        whole = self._render([_USER, {"role": ROLE, "content": output}], True)
        return whole[common_prefix(whole, self._render([_USER], False)) :]

    def _shape(self, calls: _Calls) -> _Shape | None:
        """None if the template does not take these calls."""
        if calls not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            try:
                self._shapes[calls] = self._new_shape(calls)
            except Exception:  # noqa: BLE001 - a template is a program, and raises what it likes
                self._shapes[calls] = None
        return self._shapes[calls]

    def _new_shape(self, calls: _Calls) -> _Shape:
        """Raises ConfigError if an answer or the turn before it is left out, and what the template raises."""
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
        # A template may write the turn otherwise where an answer follows (Qwen3's adds thoughts to the last), but its
        # calls alike.
        reported = self._last_call(self._render(messages, False)) if self.found else MODEL_MARK
        head = whole.rfind(reported or "", 0, whole.find(contents[0])) + len(reported or "")
        if not reported or reported not in whole[:head]:
            raise ConfigError("the chat template leaves out what the assistant wrote; set mtrl_sep to render turns")
        fixed: list[str] = []
        text = whole[head:]
        for content in contents:
            before, _, text = text.partition(content)
            fixed.append(before)
        return _Shape(messages, head, (*fixed, text))

    def _probe(self) -> _Shape:
        """The shape of one answer. Raises ConfigError if the template takes no tool's message."""
        try:
            return self._new_shape(_Calls.made_up(1))
        except ConfigError:
            raise
        except Exception as error:  # a template is a program, and raises what it likes
            raise ConfigError(
                f"the chat template refuses a turn of role {ROLE!r} behind the model's: {error}; "
                "set another mtrl_role, or mtrl_sep"
            ) from error

    # What is appended

    def _segments(
        self, context: Sequence[int], missing: str, fixed: Sequence[str], text: str, shown: Sequence[str]
    ) -> list[Segment]:
        """`text`, which stands behind the calls, as segments; `missing`: what the engine cut off of the last call."""
        encode = self._tokenizer.encode
        ids, after = encode(missing + text), encode(fixed[-1])
        n_before = common_prefix(ids, encode(missing + fixed[0]))
        # A token in which template and output meet counts as the output's.
        n_after = common_prefix(ids[n_before:][::-1], after[::-1])
        behind = len(ids) - n_after
        reported = count_written(context, ids[:n_before], self.end_token_ids, self._control)
        segments = [
            _template(ids[reported:n_before], self._tokenizer),
            *_outputs(ids[n_before:behind], [encode(each) for each in fixed[1:-1]], shown, self._tokenizer),
            _template(ids[behind:], self._tokenizer),
        ]
        return [segment for segment in segments if segment.tokens]


def _named(found: Sequence[Call], n: int) -> _Calls:
    """The first `n` calls of an action; where it holds fewer, the others have no name."""
    made_up = _Calls.made_up(n)
    names = [plain_name(call.name) or _UNNAMED for call in found[:n]]
    ids = [plain_name(call.id or "") or made_up.ids[number] for number, call in enumerate(found[:n])]
    return _Calls((*names, *made_up.names[len(names) :]), (*ids, *made_up.ids[len(ids) :]))


def plain_name(text: str) -> str:
    """`text` without what a template must not be shown in a name or an id."""
    return _NOT_PLAIN.sub("_", text[:_MAX_NAME])


def made_up_id(number: int) -> str:
    """The id of a call that has none: nine letters and digits, as Mistral's templates demand."""
    return f"call{number % 100_000:05d}"


def _answers(calls: _Calls, contents: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"role": ROLE, "content": content, "name": name, "tool_call_id": call_id}
        for content, name, call_id in zip(contents, calls.names, calls.ids, strict=True)
    ]


def _template(ids: Sequence[int], tokenizer: Tokenizer) -> Segment:
    return Segment(Author.TEMPLATE, tuple(ids), text=tokenizer.decode(ids))


def _outputs(
    ids: Sequence[int], between: Sequence[Sequence[int]], shown: Sequence[str], tokenizer: Tokenizer
) -> list[Segment]:
    """The outputs, and what the template puts between them, which is found by the tokens at its heart."""
    segments: list[Segment] = []
    rest = list(ids)
    for output, separator in zip(shown, between, strict=False):
        place = _place(rest, separator)
        if place is None:
            break
        start, end = place
        segments += [Segment(Author.TOOL, tuple(rest[:start]), text=output), _template(rest[start:end], tokenizer)]
        rest = rest[end:]
    left = shown[len(segments) // 2 :]
    return [*segments, Segment(Author.TOOL, tuple(rest), text="\n".join(left))]


def _place(ids: Sequence[int], wanted: Sequence[int]) -> tuple[int, int] | None:
    """Where `wanted` stands in `ids`, or what is left of it if its first or last token merged with an output's."""
    for core in (wanted, wanted[1:], wanted[:-1], wanted[1:-1]):
        n = len(core)
        for start in range(len(ids) - n + 1) if n else ():
            if ids[start] == core[0] and list(ids[start : start + n]) == list(core):
                return start, start + n
    return None
