"""One pass over a model's text, from opening to opening, never looking inside an observation.

Every format finds its calls with a `Scanner`: the format says what opens a call and how to read one; the scanner
steps over observation blocks (of every format: a call quoted in a tool's answer is nobody's call) and keeps the
whole linear in the text's length.
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
"""What opens and what closes an observation, in all formats: the built-in ones, and those loaded by now."""
THOUGHTS: Mapping[str, str] = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""What opens and what closes a model's thoughts. What stands before a closing without an opening is a thought too: the
chat template opened it in the prompt."""


def know_observation(opening: str, closing: str) -> None:
    """Have every format step over what stands between these two, as over the observations of built-in formats."""
    _observations.setdefault(opening, closing)


class Cursor:
    """Searches from places that only move forward: what was found or missed once is not searched for again.

    Without that, a text of many openings that wait for one far or missing end would be read once for each of them.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._found: dict[str, int] = {}
        self._matched: dict[re.Pattern[str], re.Match[str] | None] = {}

    def find(self, needle: str, start: int) -> int:
        """The first place of `needle` at or behind `start`, or -1. `start` may not go back from call to call."""
        known = self._found.get(needle)
        if known is None or -1 < known < start:
            known = self._found[needle] = self.text.find(needle, start)
        return known

    def search(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        """The first match that begins at or behind `start`, which may not go back from call to call."""
        if pattern not in self._matched:
            self._matched[pattern] = pattern.search(self.text, start)
        known = self._matched[pattern]
        if known is not None and known.start() < start:
            known = self._matched[pattern] = pattern.search(self.text, start)
        return known


Take = Callable[[re.Match[str], Cursor], tuple[Call | list[Call] | None, int]]
"""Reads what stands at an opening: the call or the calls, or None if it is none, and where to go on (behind the
opening's start)."""


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
        """`opening`: regular expression for what opens a call, in linear time, each of its alternatives beginning with
        a plain character. `hints`: strings one of which every text with a call holds. `observation`: what opens and
        closes this format's own observation block. `thoughts`: what opens and closes text in which no call is looked
        for, such as `THOUGHTS`; what is not closed reaches to the end of the text, or, with `searches_open_thoughts`,
        is ordinary text."""
        self._opening, self._hints = opening, hints
        self._thoughts = dict(thoughts or {})
        own = observation[0] if observation else None
        self._to_the_end = {own} if searches_open_thoughts else {own, *self._thoughts}
        self._own = dict([observation] if observation else []) | self._thoughts
        self._pattern = self._compiled()

    def calls(self, text: str, take: Take) -> list[Call]:
        """All calls, in order, without overlap."""
        if not self._may_contain_call(text):
            return []
        behind = self._behind_opened_thought(text)
        calls = self._from(text, 0, take)
        if behind and not any(call.start < behind < call.end and call.error is None for call in calls):
            # Else the closing is quoted in a call, and closes nothing.
            calls = self._from(text, behind, take)
        return calls

    def _from(self, text: str, position: int, take: Take) -> list[Call]:
        if self._known != len(_observations):
            self._pattern = self._compiled()
        cursor = Cursor(text)
        calls: list[Call] = []
        while match := self._pattern.search(text, position):
            if match.group() in self._closing:
                position = self._behind_block(match, cursor)
                continue
            in_use, position = take(match, cursor)
            if isinstance(in_use, list):
                calls += in_use
            elif in_use is not None:
                calls.append(in_use)
        return calls

    def _compiled(self) -> re.Pattern[str]:
        self._known = len(_observations)
        self._closing = _observations | self._own
        literals = sorted(self._closing, key=len, reverse=True)
        blocks = "|".join(re.escape(o) + (r"(?!\w)" if o[-1].isalnum() else "") for o in literals)
        # No group around an alternative: `re` then knows the first characters and skips to the next of them.
        return re.compile(f"{blocks}|{self._opening}")

    def _may_contain_call(self, text: str) -> bool:
        # A plain loop: this is most of the work on a text that has no call of the format, and it is done for each.
        for hint in self._hints:  # noqa: SIM110
            if hint in text:
                return True
        return False

    def _behind_opened_thought(self, text: str) -> int:
        """Where a thought ends that the prompt opened; 0 if it opened none."""
        for opening, closing in self._thoughts.items():
            close = text.find(closing)
            if close >= 0 and text.find(opening, 0, close) < 0:
                return close + len(closing)
        return 0

    def _behind_block(self, match: re.Match[str], cursor: Cursor) -> int:
        """Where an observation or a thought ends. A thought, or an observation of this format, that is not closed
        reaches to the end of the text; an observation of another format that is not closed is ordinary text."""
        opening = match.group()
        closing = self._closing[opening]
        close = cursor.find(closing, match.end())
        if close >= 0:
            return close + len(closing)
        return len(cursor.text) if opening in self._to_the_end else match.end()
