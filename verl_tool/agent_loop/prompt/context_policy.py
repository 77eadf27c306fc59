"""Shorten the context that the model is fed at its next turn (option ``context``)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from verl_tool.agent_loop.action_tokens import token_at
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.trajectory import Author, Segment
from verl_tool.agent_loop.trajectory_builder import TrajectoryBuilder
from verl_tool.formats.scan import THOUGHTS


def next_context(builder: TrajectoryBuilder, options: EpisodeOptions, tokenizer: Tokenizer) -> list[int] | None:
    """Return the tokens to feed in place of the current context, or None if it stays unchanged.

    The tokens are taken from the record and never encoded again. ``drop_thoughts`` leaves out the thoughts of the
    model's turns, as the templates of reasoning models do. ``window`` leaves out the oldest turns.
    """
    if options.context == "drop_thoughts":
        pieces = _without_thoughts(builder.own_segments, tokenizer)
    elif options.context == "window":
        pieces = _window(builder, options)
    else:
        return None
    context = list(itertools.chain.from_iterable(pieces))
    return None if context == builder.context else context


def prompt_tokens(builder: TrajectoryBuilder) -> list[int]:
    """Return the tokens of the task's prompt."""
    return [token for segment in builder.segments[: builder.prompt_segments] for token in segment.tokens]


def _window(builder: TrajectoryBuilder, options: EpisodeOptions) -> list[Sequence[int]]:
    """Return the prompt and the last `context_turns` turns, or the whole context while it fits `context_tokens`."""
    limit = options.context_tokens
    segments = builder.own_segments
    turns = [place for place, segment in enumerate(segments) if _is_turn(segment)]
    assert options.context_turns is not None  # the options are validated
    if len(turns) <= options.context_turns or (limit is not None and len(builder.context) <= limit):
        return [builder.context]
    prompt = segments[: builder.prompt_segments]
    return [segment.tokens for segment in [*prompt, *segments[turns[-options.context_turns] :]]]


def _is_turn(segment: Segment) -> bool:
    """Return whether a segment is a turn of its agent."""
    return segment.author is Author.MODEL and not segment.summary


def _without_thoughts(segments: Sequence[Segment], tokenizer: Tokenizer) -> list[Sequence[int]]:
    """Return the tokens of each segment without thoughts. A thought includes everything in a turn up to its end, the
    empty lines after it, and the marker that opens it, which some templates write before the turn."""
    pieces: list[Sequence[int]] = []
    for place, segment in enumerate(segments):
        pieces.append(segment.tokens)
        closing = max(THOUGHTS.values(), key=segment.text.rfind)
        end = segment.text.rfind(closing) + len(closing)
        if not _is_turn(segment) or closing not in segment.text:
            continue
        [opening] = [mark for mark, closed in THOUGHTS.items() if closed == closing]
        rest = segment.text[end:]
        end += len(rest) - len(rest.lstrip("\n"))
        pieces[-1] = segment.tokens[token_at(segment.tokens, end, tokenizer) :] if end < len(segment.text) else ()
        before = segments[place - 1]
        if opening not in segment.text[:end] and before.text.rstrip("\n").endswith(opening):
            length = token_at(before.tokens, before.text.rfind(opening), tokenizer)
            pieces[-2] = before.tokens[:length]
    return pieces
