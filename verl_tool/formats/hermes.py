"""Hermes calls, as Qwen and other chat models write them: ``<tool_call>{json}</tool_call>``, ``<tool_response>``.

Source: the Hermes function-calling format (NousResearch/Hermes-Function-Calling).

A call whose JSON is broken is a `Call` with `error`. A closing tag that the engine cut off is accepted when the JSON is
complete and the last thing in the text; JSON that is cut off too is a `Call` with `error`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from verl_tool.formats import json_call, markers
from verl_tool.formats.base import Call
from verl_tool.formats.scan import Cursor, Scanner
from verl_tool.protocol import ToolDescription

OPENING, CLOSING = "<tool_call>", "</tool_call>"
OBSERVATION = ("<tool_response>", "</tool_response>")
_REACH = 65536
"""Characters behind the first closing tag within which a call ends whose strings hold that tag."""


class HermesFormat:
    """One JSON object a call, between tags."""

    name = "hermes"
    stop: tuple[str, ...] = (CLOSING,)

    def __init__(self) -> None:
        self._scanner = Scanner(re.escape(OPENING), (OPENING,), OBSERVATION)

    def markers(self) -> tuple[str, ...]:
        """The strings that `markers.claim` should know."""
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
        if markers.holds_marker(text, match.end()):
            return None, match.end()
        payload = text[match.end() :]
        parsed = json_call.parse(payload)
        missing = CLOSING if parsed.error is None else ""
        return self._call(parsed, match.start(), len(text), missing), len(text)

    def _call(self, parsed: json_call.JsonCall, start: int, end: int, missing: str = "") -> Call:
        return Call(parsed.name, parsed.input, start, end, self, parsed.arguments, parsed.error, missing=missing)

    def render(self, output: str, call: Call | None = None) -> str:
        missing = call.missing if call else ""
        return f"{missing}\n{OBSERVATION[0]}\n{markers.escape_markers(output)}\n{OBSERVATION[1]}\n"

    def write(self, name: str, payload: str) -> str:
        """A call as a model would write it, with `payload` as its argument ``input``."""
        return f"{OPENING}\n{json.dumps({'name': name, 'arguments': {'input': payload}})}\n{CLOSING}"

    def usage(self, tools: Sequence[ToolDescription]) -> str:
        functions = "\n".join(json.dumps(_as_function(tool), ensure_ascii=False) for tool in tools)
        example = _example(self, tools)
        return (
            "You can call functions. Their signatures, as JSON schemas:\n"
            f"<tools>\n{functions}\n</tools>\n"
            f'Write each call as one JSON object with "name" and "arguments" between {OPENING} and {CLOSING}, such as\n'
            f"{example}\n"
            f"and stop there. The result comes back between {OBSERVATION[0]} and {OBSERVATION[1]}; go on from it."
        )


def _close_behind_strings(text: str, body: int, close: int) -> int | None:
    """Where the closing tag stands if the first one is part of a JSON string, as in code that prints it."""
    window = text[body : close + _REACH]
    try:
        _, length = json_call.decode_prefix(window)
    except ValueError:
        return None
    rest = window[length:]
    end = body + length + len(rest) - len(rest.lstrip())
    return end if text.startswith(CLOSING, end) else None


def _as_function(tool: ToolDescription) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _example(fmt: HermesFormat, tools: Sequence[ToolDescription]) -> str:
    for tool in tools:
        for action in tool.example_actions:
            if fmt.find_calls(action):
                return action
    return fmt.write(tools[0].name, "…") if tools else fmt.write("name", "…")
