"""Calls between control tokens, their name before their JSON arguments: Kimi's and DeepSeek's.

A call ends at its closing token, or at what else can only stand behind it, or at the end of the text: engines leave out
the token at which they stop.
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
    """What else ends a call: it belongs to what follows."""

    def __init__(self) -> None:
        self._scanner = Scanner(re.escape(self.opening), (self.opening,), OBSERVATION, THOUGHTS)
        ends = (self.closing, self.opening, *self.behind)
        self._end = re.compile("|".join(re.escape(token) for token in ends))

    def find_calls(self, text: str) -> list[Call]:
        return self._scanner.calls(text, self._take)

    @abstractmethod
    def _read(self, body: str) -> tuple[json_call.JsonCall, str | None]:
        """What stands between the tokens, and the call's id if it has one."""

    def _take(self, match: re.Match[str], cursor: Cursor) -> tuple[Call | None, int]:
        stop = cursor.search(self._end, match.end())
        body_end = stop.start() if stop else len(cursor.text)
        end = stop.end() if stop and stop.group() == self.closing else body_end
        parsed, call_id = self._read(cursor.text[match.end() : body_end])
        call = Call(parsed.name, parsed.input, match.start(), end, self, parsed.arguments, parsed.error, call_id)
        return call, end
