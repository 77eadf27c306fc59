"""Append observations to what the model has seen: within the model's turn, or as a new turn of the chat.

Appended text is encoded on its own. The tokens before it never change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.rendering.template_text import (
    MODEL_MARK,
    TOOL_MARK,
    closing_token,
    common_prefix,
    generation_prompt,
    without_suffix,
)
from verl_tool.agent_loop.rendering.tokenizer_with_tools import PROBE, SCHEMA_MARK, TokenizerWithTools
from verl_tool.agent_loop.rendering.tool_messages import ROLE, ToolMessageRenderer
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.trajectory import Author, Segment
from verl_tool.errors import ConfigError
from verl_tool.formats import ALL_FORMATS, Call, Format


class ObservationRenderer(Protocol):
    """Renders an observation as segments that follow the tokens so far."""

    end_token_ids: frozenset[int]
    """Tokens with which the model closes its turn."""

    def first(self, prompt: Sequence[int], observation: str) -> list[Segment]:
        """Return the whole prompt, with an observation that comes before the model's first turn."""
        ...

    def parts(self, observation: str) -> list[str]:
        """Split an observation into texts that are escaped and truncated one by one."""
        ...

    def next(self, context: Sequence[int], parts: Sequence[str], calls: Sequence[Call]) -> list[Segment]:
        """Return the segments to append after the model's turn, which ends `context` and contains `calls`."""
        ...


class _SinglePart:
    """Treats an observation as one text."""

    def parts(self, observation: str) -> list[str]:
        return [observation]


class InlineRenderer(_SinglePart):
    """Puts the observation right after the action, within the model's turn."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: frozenset[int]) -> None:
        self.end_token_ids = end_token_ids
        self._tokenizer = tokenizer

    def first(self, prompt: Sequence[int], observation: str) -> list[Segment]:
        return [_prompt(prompt, self._tokenizer), *self.next(prompt, [observation], ())]

    def next(self, context: Sequence[int], parts: Sequence[str], calls: Sequence[Call]) -> list[Segment]:
        [observation] = parts
        tokens = tuple(self._tokenizer.encode(observation))
        return [Segment(Author.TOOL, tokens, text=observation)] if tokens else []


class SeparatorRenderer(_SinglePart):
    """Inserts the observation into the text of `mtrl_sep`, after `turn_end_token` if the model did not write it."""

    def __init__(
        self, tokenizer: Tokenizer, end_token_ids: frozenset[int], separator: str, turn_end_token: str | None
    ) -> None:
        self.end_token_ids = end_token_ids
        self._tokenizer = tokenizer
        self._close = turn_end_token or ""
        before, after = separator.split("{obs}")
        self._before, self._after = before.removeprefix(self._close), after
        self._pieces = _Pieces(tokenizer, self._close, self._before, self._after)

    def first(self, prompt: Sequence[int], observation: str) -> list[Segment]:
        text = self._before + observation + self._after
        return [_prompt(prompt, self._tokenizer), *self._pieces.split(text, observation)]

    def next(self, context: Sequence[int], parts: Sequence[str], calls: Sequence[Call]) -> list[Segment]:
        [observation] = parts
        text = self._close + self._before + observation + self._after
        return self._pieces.append(context, self.end_token_ids, text, observation)


class ChatTemplateRenderer(_SinglePart):
    """Renders the observation as a turn, with the model's chat template.

    A dummy conversation is rendered with the observation as its last turn; the text after the dummy turn of the
    assistant is appended. If the model closed its turn itself, the template's closing is left out up to the token that
    the model wrote. The result equals the whole conversation rendered at once if the template (a) renders a turn alike
    at every position, (b) separates turns by tokens that merge with no text, and (c) leaves the model's text unchanged,
    and if (d) the model chose the same tokens as the tokenizer. Qwen3's template, which drops thoughts of earlier
    turns, breaks (c). In any case, the tokens that the model saw are kept. `ObservationRenderers` passes the prompt's
    tools to the template where they change the result.
    """

    def __init__(
        self, tokenizer: Tokenizer, end_token_ids: frozenset[int], role: str, turn_end_token: str | None = None
    ) -> None:
        self.end_token_ids = end_token_ids
        self._tokenizer, self._role = tokenizer, role
        tail = self._probe()
        if tail.count(TOOL_MARK) != 1:
            raise ConfigError(
                f"the chat template writes a turn of role {role!r} {tail.count(TOOL_MARK)} times; it must write it "
                "once: set another mtrl_role, or mtrl_sep"
            )
        before, after = tail.split(TOOL_MARK)
        self._close = before[: common_prefix(before, self._render_after_reply([]))]
        if turn_end_token is not None and turn_end_token not in self._close:
            raise ConfigError(
                f"turn_end_token={turn_end_token!r}, but the chat template closes the model's turn with "
                f"{self._close!r}; leave turn_end_token out, or set mtrl_sep"
            )
        self._pieces = _Pieces(tokenizer, self._close, before[len(self._close) :], after)
        self._opening = tuple(tokenizer.encode(generation_prompt(tokenizer)))
        if turn_end_token is None:
            self.end_token_ids |= closing_token(tokenizer, self._close)

    def first(self, prompt: Sequence[int], observation: str) -> list[Segment]:
        # The prompt already opens the model's turn; the observation's turn goes before that opening.
        stored = without_suffix(tuple(prompt), self._opening)
        text = self._text(observation)[len(self._close) :]
        return [_prompt(stored, self._tokenizer), *self._pieces.split(text, observation)]

    def next(self, context: Sequence[int], parts: Sequence[str], calls: Sequence[Call]) -> list[Segment]:
        [observation] = parts
        return self._pieces.append(context, self.end_token_ids, self._text(observation), observation)

    def _probe(self) -> str:
        try:
            return self._text(TOOL_MARK)
        except Exception as error:  # a template is a program, and raises what it likes
            raise ConfigError(
                f"the chat template refuses a turn of role {self._role!r} behind the model's: {error}; "
                "set another mtrl_role, or mtrl_sep"
            ) from error

    def _text(self, observation: str) -> str:
        return self._render_after_reply([{"role": self._role, "content": observation}])

    def _render_after_reply(self, messages: list[dict[str, Any]]) -> str:
        dummy = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MODEL_MARK}, *messages]
        text = self._tokenizer.apply_chat_template(dummy, add_generation_prompt=bool(messages))
        _, mark, tail = text.partition(MODEL_MARK)
        if not mark:
            raise ConfigError("the chat template leaves out what the assistant wrote; set mtrl_sep to render turns")
        return tail


def renderer_for(
    options: EpisodeOptions, tokenizer: Tokenizer, formats: Sequence[Format] = ALL_FORMATS
) -> InlineRenderer | SeparatorRenderer | ChatTemplateRenderer | ToolMessageRenderer:
    """Return the renderer that the options select, for a model that calls in `formats`. Raises ConfigError if the chat
    template does not fit them."""
    ends = tokenizer.eos_token_ids | set(options.additional_eos_token_ids) | _turn_end_id(options, tokenizer)
    if not options.enable_mtrl:
        return InlineRenderer(tokenizer, ends)
    if options.mtrl_sep is not None:
        return SeparatorRenderer(tokenizer, ends, options.mtrl_sep, options.turn_end_token)
    if options.mtrl_role == ROLE:
        return ToolMessageRenderer(tokenizer, ends, formats, options.turn_end_token)
    return ChatTemplateRenderer(tokenizer, ends, options.mtrl_role, options.turn_end_token)


def user_renderer(renderer: ObservationRenderer) -> ObservationRenderer:
    """Return a renderer of user messages if `renderer` renders ``tool`` messages, else `renderer` itself."""
    if not isinstance(renderer, ToolMessageRenderer):
        return renderer
    return ChatTemplateRenderer(renderer.tokenizer, renderer.end_token_ids, "user", renderer.turn_end_token)


class ObservationRenderers:
    """Selects a model's renderer by the tools that the chat template described in the prompt.

    With tools, a template may write another text around an observation: the names of the tools (GigaChat), another
    opening of the model's turn (VAETKI), or tool messages at all (Falcon-H1). Such a template gets the tools with each
    observation too, so that the fed tokens equal the conversation rendered as a whole. A template that repeats the
    schemas with each user turn (Mistral, with ``mtrl_role=user``) does not get them: rendered as a whole, the schemas
    come before the last user turn only, and tokens that were fed cannot be taken back. They stay in the prompt.
    """

    def __init__(self, options: EpisodeOptions, tokenizer: Tokenizer, formats: Sequence[Format]) -> None:
        self._options, self._tokenizer, self._formats = options, tokenizer, tuple(formats)

    def of(self, schemas: Sequence[Mapping[str, Any]] | None) -> ObservationRenderer:
        """Return the renderer to use after a prompt in which the template described `schemas`. Raises ConfigError if
        the template does not fit the options."""
        return self._with_tools(schemas) if schemas and self._template_depends_on_tools else self._plain

    def _with_tools(self, schemas: Sequence[Mapping[str, Any]]) -> ObservationRenderer:
        return renderer_for(self._options, TokenizerWithTools(self._tokenizer, schemas), self._formats)

    @functools.cached_property
    def _plain(self) -> ObservationRenderer:
        return renderer_for(self._options, self._tokenizer, self._formats)

    @functools.cached_property
    def _template_depends_on_tools(self) -> bool:
        """Whether tools change the text around an observation without adding their schemas to it."""
        if not self._options.enable_mtrl or self._options.mtrl_sep is not None:
            return False
        text = self._render_probe(lambda: self._with_tools([PROBE]))
        return text is not None and SCHEMA_MARK not in text and text != self._render_probe(lambda: self._plain)

    def _render_probe(self, renderer: Callable[[], ObservationRenderer]) -> str | None:
        """Return the text that a renderer appends for an observation; None if the template rejects it."""
        try:
            segments = renderer().next((), [TOOL_MARK], ())
        except Exception:  # noqa: BLE001 - a template is a program, and raises what it likes
            return None
        return "".join(self._tokenizer.decode(segment.tokens) for segment in segments)


class _Pieces:
    """Splits appended text into tokens of the template and of the tool, without what the model wrote itself."""

    def __init__(self, tokenizer: Tokenizer, close: str, before: str, after: str) -> None:
        self._tokenizer = tokenizer
        self._n_close = len(tokenizer.encode(close))
        self._closed_before = tokenizer.encode(close + before)
        self._before = tokenizer.encode(before)
        self._after_text, self._after = after, tokenizer.encode(after)

    def append(
        self, context: Sequence[int], end_token_ids: frozenset[int], text: str, observation: str
    ) -> list[Segment]:
        """Split `text`, which starts with the closing of the model's turn, into segments to append to `context`."""
        ids = self._tokenizer.encode(text)
        n_before = common_prefix(ids, self._closed_before)
        written = 0
        if context and context[-1] in end_token_ids and context[-1] in ids[: self._n_close]:
            written = ids.index(context[-1]) + 1
        return self._segments(ids[written:], max(0, n_before - written), observation)

    def split(self, text: str, observation: str) -> list[Segment]:
        """Split `text`, which starts with the observation's turn, into segments."""
        ids = self._tokenizer.encode(text)
        return self._segments(ids, common_prefix(ids, self._before), observation)

    def _segments(self, ids: list[int], n_before: int, observation: str) -> list[Segment]:
        # A token that spans template and observation counts as the observation's.
        n_after = common_prefix(ids[n_before:][::-1], self._after[::-1])
        middle = len(ids) - n_after
        before, tool, after = ids[:n_before], ids[n_before:middle], ids[middle:]
        segments = [
            Segment(Author.TEMPLATE, tuple(before), text=self._tokenizer.decode(before)),
            Segment(Author.TOOL, tuple(tool), text=observation),
            Segment(Author.TEMPLATE, tuple(after), text=self._after_text),
        ]
        return [segment for segment in segments if segment.tokens]


def _prompt(ids: Sequence[int], tokenizer: Tokenizer) -> Segment:
    return Segment(Author.PROMPT, tuple(ids), text=tokenizer.decode(ids))


def _turn_end_id(options: EpisodeOptions, tokenizer: Tokenizer) -> frozenset[int]:
    if options.turn_end_token is None:
        return frozenset()
    ids = tokenizer.encode(options.turn_end_token)
    if len(ids) != 1:
        raise ConfigError(
            f"turn_end_token={options.turn_end_token!r} is {len(ids)} tokens in this tokenizer; it must be one. "
            "Leave it out to use what the chat template writes"
        )
    return frozenset(ids)
