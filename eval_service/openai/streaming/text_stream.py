"""Text from tokens as they come: no character is split, no stop string shown, no token that merely ends a turn."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from verl_tool.agent_loop.rendering.template_text import common_prefix
from verl_tool.agent_loop.tokenizer import BROKEN_CHARACTER, Tokenizer

_RARE = ("𓀀", "𐎀", "\U000e0100", "ꙮ")
"""Characters of which most tokenizers have no token, so that their encoding begins with that of a byte."""
_WINDOW = 64
"""Tokens after which unsettled text is decoded now and then only."""


class Detokenizer:
    """Decodes token by token; what it gives out, put together, is the text of all tokens at once.

    What the next tokens may still change is held back: an unfinished character, which shows as one U+FFFD at the end
    or as one for each of its bytes; and, where bytes are tokens of their own (``<0xE6>``), all bytes before it in a
    row, of which none shows as long as one is wrong. Tokens are decoded together with the ones before them, because
    some tokenizers write a word's leading blank only if something stands before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._first_partial_byte = _first_partial_byte(tokenizer)  # type: ignore[arg-type]  # any tokenizer is hashable
        self._before: list[int] = []
        self._before_text = ""
        self._window: list[int] = []
        self._given = 0
        self._due = 0
        """Tokens of the window at which it is decoded next."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is settled now."""
        self._window += token_ids
        if len(self._window) < self._due:
            return ""
        text = self._decode(self._window)
        settled = self._settled(text)
        new = text[self._given : settled]
        self._given = max(self._given, settled)
        self._due = len(self._window) + 1 if len(self._window) < _WINDOW else len(self._window) + _WINDOW
        if self._window and settled == len(text):
            self._before, self._window, self._given, self._due = self._window, [], 0, 0
            self._before_text = self._tokenizer.decode(self._before)
        return new

    def finish(self) -> str:
        """What was held back."""
        new = self._decode(self._window)[self._given :]
        self._before, self._before_text, self._window, self._given, self._due = [], "", [], 0, 0
        return new

    def _settled(self, text: str) -> int:
        """How many characters of the window's `text` no further token changes."""
        if self._first_partial_byte is None:
            return len(text.removesuffix(BROKEN_CHARACTER))
        broken = self._decode([*self._window, self._first_partial_byte])
        return len(text[: common_prefix(text, broken)].rstrip(BROKEN_CHARACTER))

    def _decode(self, window: Sequence[int]) -> str:
        if not window:
            return ""
        return self._tokenizer.decode([*self._before, *window])[len(self._before_text) :]


@functools.lru_cache(maxsize=8)
def _first_partial_byte(tokenizer: Tokenizer) -> int | None:
    """A token that is the first byte of a longer character, if each byte of an unfinished one shows as a U+FFFD of its
    own and spoils those before it; None for all other tokenizers."""
    for character in _RARE:
        tokens = tokenizer.encode(character)
        started = [i for i, token in enumerate(tokens[:-1]) if tokenizer.decode([token]) == BROKEN_CHARACTER]
        if started:
            first = started[0]
            return tokens[first] if len(tokenizer.decode(tokens[first:-1])) > 1 else None
    return None


class StopCut:
    """Gives text out up to the first of `stops`; what may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that certainly stands before a stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        # The one that is complete first, as if the text came letter by letter; of several, the one that began first.
        spans = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stops if stop in text]
        if spans:
            self.stopped, self._held = True, ""
            return text[: min(spans)[1]]
        keep = self._may_begin_a_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _may_begin_a_stop(self, text: str) -> int:
        """How many characters at the end of `text` begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-n:]) for stop in self._stops):
                return n
        return 0


class TurnText:
    """The text of one turn of the model as a reader sees it.

    Left out: `stops` and what follows them, and the tokens of `end_token_ids` that end the turn.
    """

    def __init__(self, tokenizer: Tokenizer, end_token_ids: frozenset[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._end_token_ids = end_token_ids
        self._cut = StopCut(stops)
        self._ends: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        n = len(token_ids)
        while n and token_ids[n - 1] in self._end_token_ids:
            n -= 1
        if n:
            settled = [*self._ends, *token_ids[:n]]
            self._ends = list(token_ids[n:])
            return self._cut.push(self._detokenizer.push(settled))
        self._ends += token_ids
        return ""

    def finish(self) -> str:
        return self._cut.push(self._detokenizer.finish()) + self._cut.finish()

    def ending(self) -> list[int]:
        """The tokens at the end of the turn that were left out."""
        return list(self._ends)


def turn_text(
    token_ids: Sequence[int], tokenizer: Tokenizer, end_token_ids: frozenset[int], stops: Sequence[str]
) -> str:
    """The text of a whole turn: what `TurnText` gives out, put together."""
    text = TurnText(tokenizer, end_token_ids, stops)
    return text.push(token_ids) + text.finish()
