"""Text from tokens as they come: no character is split, no stop string shown, no token that merely ends a turn."""

from __future__ import annotations

from collections.abc import Sequence

from verl_tool.agent_loop.tokenizer import Tokenizer

_BROKEN_CHARACTER = "\ufffd"
_LONGEST_WINDOW = 64
"""Tokens after which broken text is given out as it is."""


class Detokenizer:
    """Decodes token by token; what it gives out, put together, is the text of all tokens at once.

    An unfinished character shows as one U+FFFD at the end of the decoded text: that one is held back until the next
    tokens complete it. Tokens are decoded together with the ones before them, because some tokenizers write a word's
    leading blank only if something stands before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._before_text = ""
        self._window: list[int] = []
        self._given = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is settled now."""
        self._window += token_ids
        text = self._decode()
        unfinished = text.endswith(_BROKEN_CHARACTER)
        if unfinished and len(self._window) < _LONGEST_WINDOW:
            text = text[:-1]
        new = text[self._given :]
        self._given = max(self._given, len(text))
        if self._window and (not unfinished or len(self._window) >= _LONGEST_WINDOW):
            self._before, self._window, self._given = self._window, [], 0
            self._before_text = self._tokenizer.decode(self._before)
        return new

    def finish(self) -> str:
        """What was held back."""
        new = self._decode()[self._given :]
        self._before, self._before_text, self._window, self._given = [], "", [], 0
        return new

    def _decode(self) -> str:
        if not self._window:
            return ""
        return self._tokenizer.decode([*self._before, *self._window])[len(self._before_text) :]


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
        ends = [text.index(stop) for stop in self._stops if stop in text]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
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
        """The text that is settled now."""
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
        """What was held back."""
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
