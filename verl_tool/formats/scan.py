"""Scan a model's text for calls in one pass, from opening to opening, without looking inside observations.

Each format finds its calls with a `Scanner`. The format says what opens a call and how to read it. The scanner skips
observations of all formats, since a call quoted in a tool's answer is not a call, and takes time linear in the text's
length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from verl_tool.formats.base import Call

_observations: dict[str, str] = {
    "```output": "\n```",
    "<result>": "</result>",
    "<PYTHON-OUTPUT>": "</PYTHON-OUTPUT>",
    "<information>": "</information>",
    "<tool_response>": "</tool_response>",
    "<call>": "<response>",
}
"""Strings that open and close an observation, in the built-in formats and in all formats loaded so far."""
THOUGHTS: Mapping[str, str] = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""Strings that open and close a model's thoughts. Text before a closing without an opening is a thought too: the chat
template opened it in the prompt."""


def split_thoughts(text: str) -> tuple[str, str]:
    """Return the thoughts at the beginning of a turn, and the text behind them. The chat template may have opened the
    thoughts in the prompt."""
    for opening, closing in THOUGHTS.items():
        before, found, behind = text.partition(closing)
        if found:
            return before.removeprefix(opening).strip(), behind
    return "", text


def remove_thoughts(text: str) -> str:
    """Return a turn without thoughts: what is behind the last closing, up to an opening that is never closed."""
    for opening, closing in THOUGHTS.items():
        unclosed = text.find(opening, text.rfind(closing) + 1)
        text = text if unclosed < 0 else text[:unclosed]
        text = text.rpartition(closing)[2]
    return text


def know_observation(opening: str, closing: str) -> None:
    """Let all formats skip the text between these two strings, like the observations of built-in formats."""
    _observations.setdefault(opening, closing)


class Cursor:
    """Searches from positions that only move forward, and caches results.

    Otherwise, a text with many openings and one distant or missing end would be searched once per opening.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._found: dict[str, int] = {}
        self._matched: dict[re.Pattern[str], re.Match[str] | None] = {}

    def find(self, needle: str, start: int) -> int:
        """Return the first position of `needle` at or after `start`, or -1. `start` must not decrease between calls."""
        known = self._found.get(needle)
        if known is None or -1 < known < start:
            known = self._found[needle] = self.text.find(needle, start)
        return known

    def search(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        """Return the first match that begins at or after `start`, which must not decrease between calls."""
        if pattern not in self._matched:
            self._matched[pattern] = pattern.search(self.text, start)
        known = self._matched[pattern]
        if known is not None and known.start() < start:
            known = self._matched[pattern] = pattern.search(self.text, start)
        return known


Take = Callable[[re.Match[str], Cursor], tuple[Call | list[Call] | None, int]]
"""Reads the text at an opening. Returns the call, several calls or None, and the position after the opening's start
from which to continue."""


class Scanner:
    """Finds the calls of one format."""

    def __init__(
        self,
        opening: str,
        hints: tuple[str, ...],
        observation: tuple[str, str] | None = None,
        thoughts: Mapping[str, str] | None = None,
        *,
        searches_open_thoughts: bool = False,
    ) -> None:
        """`opening` is a regular expression for the opening of a call. It must match in linear time, and each of its
        alternatives must begin with a plain character. Every text with a call contains one of `hints`. `observation`
        has the strings that open and close this format's observations, and `thoughts` those of text without calls, such
        as `THOUGHTS`. An unclosed thought extends to the end of the text or, with `searches_open_thoughts`, is ordinary
        text."""
        self._opening, self._hints = opening, hints
        self._thoughts = dict(thoughts or {})
        own = observation[0] if observation else None
        self._to_the_end = {own} if searches_open_thoughts else {own, *self._thoughts}
        self._own = dict([observation] if observation else []) | self._thoughts
        self._pattern = self._compile()

    def calls(self, text: str, take: Take) -> list[Call]:
        """Find all calls, in order and without overlap."""
        if not self._may_contain_call(text):
            return []
        end = self._end_of_opened_thought(text)
        calls = self._scan(text, 0, take)
        if end and not any(call.start < end < call.end and call.error is None for call in calls):
            # Otherwise the closing is quoted in a call, and does not close a thought.
            calls = self._scan(text, end, take)
        return calls

    def _scan(self, text: str, position: int, take: Take) -> list[Call]:
        if self._known != len(_observations):
            self._pattern = self._compile()
        cursor = Cursor(text)
        calls: list[Call] = []
        while match := self._pattern.search(text, position):
            if match.group() in self._closing:
                position = self._end_of_block(match, cursor)
                continue
            found, position = take(match, cursor)
            if isinstance(found, list):
                calls += found
            elif found is not None:
                calls.append(found)
        return calls

    def _compile(self) -> re.Pattern[str]:
        self._known = len(_observations)
        self._closing = _observations | self._own
        literals = sorted(self._closing, key=len, reverse=True)
        blocks = "|".join(re.escape(o) + (r"(?!\w)" if o[-1].isalnum() else "") for o in literals)
        # Without groups around the alternatives, `re` knows the first characters and can skip to them.
        return re.compile(f"{blocks}|{self._opening}")

    def _may_contain_call(self, text: str) -> bool:
        # A plain loop is fastest. This is most of the work on a text without calls, and every format does it.
        for hint in self._hints:  # noqa: SIM110
            if hint in text:
                return True
        return False

    def _end_of_opened_thought(self, text: str) -> int:
        """Return the end of a thought that the prompt opened, or 0."""
        for opening, closing in self._thoughts.items():
            close = text.find(closing)
            if close >= 0 and text.find(opening, 0, close) < 0:
                return close + len(closing)
        return 0

    def _end_of_block(self, match: re.Match[str], cursor: Cursor) -> int:
        """Return the end of an observation or thought. If it is not closed, a thought or an observation of this format
        extends to the end of the text, while an observation of another format is ordinary text."""
        opening = match.group()
        closing = self._closing[opening]
        close = cursor.find(closing, match.end())
        if close >= 0:
            return close + len(closing)
        return len(cursor.text) if opening in self._to_the_end else match.end()
