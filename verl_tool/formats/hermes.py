"""Hermes calls, as Qwen and other chat models write them: ``<tool_call>{json}</tool_call>``, ``<tool_response>``.

Source: the Hermes function-calling format (NousResearch/Hermes-Function-Calling).

A call with broken JSON is a `Call` with `error`. A closing tag may be missing, because the engine cut it off, if the
JSON is complete and at the end of the text. JSON that is cut off too is a `Call` with `error`. Calls in the model's
thoughts are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from verl_tool.formats import json_call, markers
from verl_tool.formats.base import Call
from verl_tool.formats.scan import THOUGHTS, Cursor, Scanner
from verl_tool.formats.tool_response import OBSERVATION, ToolResponseFormat

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_IN_TAGS = r"\s*(?:<function=|[\w.-]{1,200}\s*<arg_key>)"
"""Start of a call with the same tags whose arguments are tags too; see `native.qwen3_coder` and `native.glm`."""
_REACH = 65536
"""Maximum number of characters to search after a closing tag that is part of a string in the JSON."""


class HermesFormat(ToolResponseFormat):
    """Format in which each call is one JSON object between tags."""

    name = "hermes"
    stop: tuple[str, ...] = (CLOSING,)
    rule = f'Write each call as one JSON object with "name" and "arguments" between {OPENING} and {CLOSING}'

    def __init__(self) -> None:
        self._scanner = Scanner(rf"{OPENING}(?!{_IN_TAGS})", (OPENING,), OBSERVATION, THOUGHTS)

    def markers(self) -> tuple[str, ...]:
        """Return the strings to claim with `markers.claim`."""
        return (OPENING, CLOSING, *OBSERVATION)

    def find_calls(self, text: str) -> list[Call]:
        return self._scanner.calls(text, self._take)

    def _take(self, match: re.Match[str], cursor: Cursor) -> tuple[Call | None, int]:
        text, body = cursor.text, match.end()
        close = cursor.find(CLOSING, body)
        if close < 0:
            return self._unclosed(match, text)
        parsed = json_call.parse(text[body:close])
        if parsed.error is not None:
            longer = _close_behind_strings(text, body, close)
            if longer is not None:
                close = longer
                parsed = json_call.parse(text[body:close])
        end = close + len(CLOSING)
        return self._call(parsed, match.start(), end), end

    def _unclosed(self, match: re.Match[str], text: str) -> tuple[Call | None, int]:
        if markers.contains_marker(text, match.end()):
            return None, match.end()
        payload = text[match.end() :]
        parsed = json_call.parse(payload)
        missing = CLOSING if parsed.error is None else ""
        return self._call(parsed, match.start(), len(text), missing), len(text)

    def _call(self, parsed: json_call.JsonCall, start: int, end: int, missing: str = "") -> Call:
        return Call(parsed.name, parsed.input, start, end, self, parsed.arguments, parsed.error, missing=missing)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call as a model would."""
        call = {"name": name, "arguments": dict(arguments)}
        return f"{OPENING}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSING}"


def _close_behind_strings(text: str, body: int, close: int) -> int | None:
    """Return the position of the closing tag if the first one is inside a JSON string, such as code that prints it."""
    window = text[body : close + _REACH]
    try:
        _, length = json_call.decode_prefix(window)
    except ValueError:
        return None
    rest = window[length:]
    end = body + length + len(rest) - len(rest.lstrip())
    return end if text.startswith(CLOSING, end) else None
