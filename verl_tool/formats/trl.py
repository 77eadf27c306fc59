"""TRL's text-environment format: ``<request><Tool>query<call>answer<response> … Result=10.1<submit>``.

The answer follows ``<call>`` directly and ends with ``<response>``. ``<submit>`` ends the episode. It is a call named
``submit`` with the text since the last answer as its input, and no calls are found after it. A ``<call>`` may be
missing, because the engine cut it off, if the query is at the end of the text. A cut-off ``<submit>`` cannot be told
from ordinary text.

Source: TRL's `TextEnvironment` (removed from TRL since).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from verl_tool.formats import markers
from verl_tool.formats.base import Call
from verl_tool.formats.scan import Cursor, Scanner
from verl_tool.formats.tags import TAG_NAME
from verl_tool.formats.usage import usage_by_example
from verl_tool.protocol import ToolDescription

REQUEST, CALL, RESPONSE, SUBMIT = "<request>", "<call>", "<response>", "<submit>"
_OPENING = rf"{SUBMIT}|{REQUEST}\s*<(?P<tool>{TAG_NAME.pattern})>"


class TrlFormat:
    """Format with requests and submissions."""

    name = "trl"
    stop: tuple[str, ...] = (CALL, SUBMIT)
    observation: tuple[str, str] | None = (CALL, RESPONSE)

    def __init__(self) -> None:
        self._scanner = Scanner(_OPENING, (REQUEST, SUBMIT))

    def markers(self) -> tuple[str, ...]:
        """Return the strings to claim with `markers.claim`."""
        return (REQUEST, CALL, RESPONSE, SUBMIT)

    def find_calls(self, text: str) -> list[Call]:
        return self._scanner.calls(text, self._take)

    def _take(self, match: re.Match[str], cursor: Cursor) -> tuple[Call | None, int]:
        if match["tool"] is None:
            return self._submission(match.start(), match.end(), cursor.text), len(cursor.text)
        text, body, tool = cursor.text, match.end(), match["tool"]
        close, next_request = cursor.find(CALL, body), cursor.find(REQUEST, body)
        if close >= 0 and not 0 <= next_request < close:
            # The scanner continues at ``<call>``, which opens the answer if there already is one.
            return Call(tool, text[body:close], match.start(), close + len(CALL), self), close
        if markers.contains_marker(text, body):
            return None, body
        return Call(tool, text[body:], match.start(), len(text), self, missing=CALL), len(text)

    def _submission(self, start: int, end: int, text: str) -> Call:
        answered = text.rfind(RESPONSE, 0, start)
        since = answered + len(RESPONSE) if answered >= 0 else 0
        return Call("submit", text[since:start].strip(), start, end, self)

    def render(self, output: str, call: Call | None = None) -> str:
        return f"{call.missing if call else ''}{markers.escape_markers(output)}{RESPONSE}"

    def write(self, name: str, payload: str) -> str:
        """Write a call as a model would."""
        return SUBMIT if name == "submit" else f"{REQUEST}<{name}>{payload}{CALL}"

    def usage(self, tools: Sequence[ToolDescription]) -> str:
        example = usage_by_example(self, tools, lambda tool: self.write(tool.name, "…"))
        return f"{example} When you know the answer, write it as Result=… followed by {SUBMIT}."
