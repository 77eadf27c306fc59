"""Base of Kimi's and DeepSeek's formats: calls between control tokens, with a name before the JSON arguments.

A call ends at its closing token, at a token that can only follow a call, or at the end of the text, since engines leave
out the token at which they stop.
"""

from __future__ import annotations

import re
from abc import abstractmethod

from verl_tool.formats import json_call
from verl_tool.formats.base import Call
from verl_tool.formats.scan import THOUGHTS, Cursor, Scanner
from verl_tool.formats.tool_response import OBSERVATION, ToolResponseFormat


class DelimitedFormat(ToolResponseFormat):
    """One call between an opening and a closing token."""

    opening: str
    closing: str
    behind: tuple[str, ...]
    """Further tokens that end a call, and that do not belong to it."""

    def __init__(self) -> None:
        self._scanner = Scanner(re.escape(self.opening), (self.opening,), OBSERVATION, THOUGHTS)
        ends = (self.closing, self.opening, *self.behind)
        self._end = re.compile("|".join(re.escape(token) for token in ends))

    def find_calls(self, text: str) -> list[Call]:
        return self._scanner.calls(text, self._take)

    @abstractmethod
    def _read(self, body: str) -> tuple[json_call.JsonCall, str | None]:
        """Parse the text between the tokens. Return the call, and its id or None."""

    def _take(self, match: re.Match[str], cursor: Cursor) -> tuple[Call | None, int]:
        stop = cursor.search(self._end, match.end())
        body_end = stop.start() if stop else len(cursor.text)
        end = stop.end() if stop and stop.group() == self.closing else body_end
        parsed, call_id = self._read(cursor.text[match.end() : body_end])
        call = Call(parsed.name, parsed.input, match.start(), end, self, parsed.arguments, parsed.error, call_id)
        return call, end
