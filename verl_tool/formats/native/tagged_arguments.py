"""Calls whose arguments are tags too, one after the other: ``<parameter=days>3</parameter>``.

Every argument is a text, since such a call has no types: a string that reads as a number may be either. A value ends at
the first closing tag behind it; what closes the call may stand in it.
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
    """What Qwen3-Coder's and GLM's calls have in common."""

    stop: tuple[str, ...] = (TOOL_CALL_END,)
    argument: re.Pattern[str]
    """What stands before a value; its group ``key`` is the argument's name."""
    value_end: str
    ends: re.Pattern[str]
    """What closes the call behind its arguments."""
    shape: str
    """A call, in words for the model."""

    def __init__(self, opening: str, hints: tuple[str, ...]) -> None:
        """`opening`: as `Scanner` takes it; its group ``name`` is the tool's name."""
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
            return self._broken(match, cursor, position, f"what follows {_format(text, position)} is no argument")
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
        """The value that stands between the tags as `text`."""
        return text


def as_text(value: Any) -> str:
    """A value as a template writes it: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written(arguments: Mapping[str, Any], argument: str) -> str:
    """All arguments, each as `argument` with its name and its value put in."""
    return "".join(argument.format(key=key, value=as_text(value)) for key, value in arguments.items())


def _format(text: str, position: int) -> str:
    """The end of what was read, for a message."""
    return repr(text[max(0, position - 30) : position].strip())
