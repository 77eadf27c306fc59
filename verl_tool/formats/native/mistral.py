"""Tool calls of Mistral's models, after ``[TOOL_CALLS]``.

    7B v0.3, Nemo:         [TOOL_CALLS] [{"name": "f", "arguments": {…}, "id": "abcdefghi"}, …]
    Small 3.2 and later:   [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{…}[TOOL_CALLS]g[ARGS]{…}

Source: their chat templates, and vLLM's parser ``mistral``, which takes ``f{…}`` too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from verl_tool.formats import json_call
from verl_tool.formats.base import Call
from verl_tool.formats.native.json_objects import JsonObject, read_objects
from verl_tool.formats.scan import THOUGHTS, Cursor, Scanner
from verl_tool.formats.tool_response import OBSERVATION, ToolResponseFormat

OPENING = "[TOOL_CALLS]"
SHAPE = f'{OPENING}[{{"name": "…", "arguments": {{…}}}}]'
_NAMED = re.compile(r"\s*(?P<name>[\w.-]{1,200})\s*(?:\[CALL_ID\](?P<id>\w{1,200})\s*)?(?:\[ARGS\]\s*|(?=\{))")
_LIST = re.compile(r"\s*(?P<list>\[)?\s*(?=[\[{\]])")
_COMMA = re.compile(r"\s*,?\s*")
_LIST_END = re.compile(r"\s*\]")


class MistralFormat(ToolResponseFormat):
    """A JSON list of calls, or a name and JSON arguments."""

    name = "mistral"
    stop: tuple[str, ...] = ()
    rule = f'Write your calls behind {OPENING} as a JSON list of objects with "name" and "arguments"'

    def __init__(self) -> None:
        self._scanner = Scanner(re.escape(OPENING), (OPENING,), OBSERVATION, THOUGHTS)

    def markers(self) -> tuple[str, ...]:
        return (OPENING, *OBSERVATION)

    def find_calls(self, text: str) -> list[Call]:
        return self._scanner.calls(text, self._take)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{OPENING}{json.dumps([{'name': name, 'arguments': dict(arguments)}], ensure_ascii=False)}"

    def _take(self, match: re.Match[str], cursor: Cursor) -> tuple[list[Call], int]:
        """Parse the calls up to the next opening token."""
        behind = cursor.find(OPENING, match.end())
        region = cursor.text[match.end() : behind if behind >= 0 else len(cursor.text)]
        named = _NAMED.match(region)
        read = [_parse_named(region, named)] if named else _parse_list(region)
        calls = [
            Call(
                each.call.name,
                each.call.input,
                match.end() + each.start if number else match.start(),
                match.end() + each.end,
                self,
                each.call.arguments,
                each.call.error,
                each.id,
            )
            for number, each in enumerate(read)
        ]
        return calls, calls[-1].end


def _parse_named(region: str, match: re.Match[str]) -> JsonObject:
    """Parse ``f[ARGS]{…}``."""
    try:
        _, end = json_call.decode_at(region, match.end())
    except ValueError:
        end = len(region)
    return JsonObject(
        json_call.parse_arguments(match["name"], region[match.end() : end]), match.start(), end, match["id"]
    )


def _parse_list(region: str) -> list[JsonObject]:
    """Parse ``[{…}, {…}]``, or an object without the list."""
    started = _LIST.match(region)
    if started is None:
        return [_unreadable(region, "no call follows")]
    objects = read_objects(region, started.end(), _COMMA)
    if not objects:
        return [_unreadable(region, "the list is empty")]
    closed = _LIST_END.match(region, objects[-1].end)
    if started["list"] and closed:
        objects[-1] = objects[-1].ending_at(closed.end())
    return objects


def _unreadable(region: str, reason: str) -> JsonObject:
    error = f"This call cannot be read: {reason} behind {OPENING}. Write {SHAPE}."
    return JsonObject(json_call.JsonCall("", region, error=error), 0, len(region), None)
