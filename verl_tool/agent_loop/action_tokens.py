"""Tell the tokens of calls from the rest of the model's text."""

from __future__ import annotations

from collections.abc import Sequence

from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.trajectory import Segment, Trajectory
from verl_tool.formats import ALL_FORMATS, Format
from verl_tool.formats.find import find_calls


def action_mask(trajectory: Trajectory, tokenizer: Tokenizer, formats: Sequence[Format] = ALL_FORMATS) -> list[int]:
    """Return 1 for each of the model's tokens that belongs to a call, else 0. [response_length]

    `formats` are used to find the calls of turns that were recorded without `Segment.call_spans`.
    """
    mask: list[int] = []
    for segment in trajectory.response:
        mask += _mask_turn(segment, tokenizer, formats) if segment.generated else [0] * len(segment.tokens)
    return mask


def _mask_turn(turn: Segment, tokenizer: Tokenizer, formats: Sequence[Format]) -> list[int]:
    mask = [0] * len(turn.tokens)
    spans = turn.call_spans
    if spans is None:
        spans = tuple((call.start, call.end) for call in find_calls(turn.text, formats))
    for start, end in spans:
        first = token_at(turn.tokens, start, tokenizer)
        last = token_at(turn.tokens, end - 1, tokenizer)
        mask[first : last + 1] = [1] * (last + 1 - first)
    return mask


def token_at(tokens: Sequence[int], position: int, tokenizer: Tokenizer) -> int:
    """Return the index of the token that writes the character at `position`, or of the last token."""
    low, high = 0, len(tokens) - 1
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.decode(tokens[: middle + 1])) > position:
            high = middle
        else:
            low = middle + 1
    return low
