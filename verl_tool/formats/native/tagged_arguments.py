"""Base of formats whose arguments are tags: ``<parameter=days>3</parameter>``.

Every argument is a string, since such calls have no types: ``3`` may be a string or a number. A value ends at the next
closing tag of arguments. It may contain the closing tag of the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from verl_tool.formats import json_call
from verl_tool.formats.base import Call
from verl_tool.formats.scan import THOUGHTS, Cursor, Scanner
from verl_tool.formats.tool_response import OBSERVATION, ToolResponseFormat

TOOL_CALL = "<tool_call>"
TOOL_CALL_END = "</tool_call>"
_REST = re.compile(r"\s*")


class TaggedArgumentsFormat(ToolResponseFormat):
    """Common part of Qwen3-Coder's and GLM's formats."""

    stop: tuple[str, ...] = (TOOL_CALL_END,)
    argument: re.Pattern[str]
    """Matches the text before a value. Its group ``key`` is the argument's name."""
    value_end: str
    ends: re.Pattern[str]
    """Matches the end of a call, after its arguments."""
    shape: str
    """Example of a call, for error messages to the model."""

    def __init__(self, opening: str, hints: tuple[str, ...]) -> None:
        """`opening` and `hints` are those of `Scanner`. The group ``name`` of `opening` is the tool's name."""
        self._scanner = Scanner(opening, hints, OBSERVATION, THOUGHTS)

    def find_calls(self, text: str) -> list[Call]:
        return self._scanner.calls(text, self._take)

    def _take(self, match: re.Match[str], cursor: Cursor) -> tuple[Call | None, int]:
        text, name, position = cursor.text, match["name"].strip(), match.end()
        arguments: dict[str, Any] = {}
        while opened := self.argument.match(text, position):
            close = cursor.find(self.value_end, opened.end())
            if close < 0:
                return self._broken(match, cursor, opened.end(), f"{opened.group().strip()} is not closed")
            arguments[opened["key"].strip()] = self._value(text[opened.end() : close])
            position = close + len(self.value_end)
        end = self.ends.match(text, position)
        if end is None and not _REST.fullmatch(text, position):
            return self._broken(match, cursor, position, f"what follows {_text_before(text, position)} is no argument")
        behind = end.end() if end else len(text)
        missing = "" if end else TOOL_CALL_END
        provided = json_call.as_input(arguments)
        return Call(name, provided, match.start(), behind, self, arguments, missing=missing), behind

    def _broken(self, match: re.Match[str], cursor: Cursor, position: int, reason: str) -> tuple[Call, int]:
        """The call that could not be read from `position` on; it ends at the next closing tag."""
        close = cursor.find(TOOL_CALL_END, position)
        end = len(cursor.text) if close < 0 else close + len(TOOL_CALL_END)
        error = f"This call cannot be read: {reason}. Write {self.shape}."
        payload = cursor.text[match.end() : end].removesuffix(TOOL_CALL_END)
        return Call(match["name"].strip(), payload, match.start(), end, self, error=error), end

    def _value(self, text: str) -> str:
        """Return the value that is written as `text` between the tags."""
        return text


def as_text(value: Any) -> str:
    """Write a value like a chat template: a string unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_arguments(arguments: Mapping[str, Any], argument: str) -> str:
    """Write all arguments by the format string `argument`, which has the fields ``key`` and ``value``."""
    return "".join(argument.format(key=key, value=as_text(value)) for key, value in arguments.items())


def _text_before(text: str, position: int) -> str:
    """Quote the text before `position`, for a message."""
    return repr(text[max(0, position - 30) : position].strip())
