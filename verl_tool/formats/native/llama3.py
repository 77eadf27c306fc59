"""Llama 3's calls: a turn that is a JSON object, or what stands behind ``<|python_tag|>``.

    {"name": "weather", "parameters": {"city": "Oslo"}}        several with "; " between them
    <|python_tag|>{"name": "weather", "parameters": {…}}
    <|python_tag|>brave_search.call(query="weather in Oslo")
    <|python_tag|>print(1 + 1)                                 a call by the name ``python``

Without the tag, prose before or behind the objects makes the turn an answer that quotes JSON.

Source: the chat templates of Llama 3.1 and 3.2, and vLLM's parser ``llama3_json``.
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

TAG = "<|python_tag|>"
CODE = "python"
"""Name of a call that consists of code."""
_BETWEEN = re.compile(r"\s*;?\s*")
_START = re.compile(r'\s*(?=\{\s*"name"\s*:)')
_END = re.compile(r"\s*(?:<\|(?:eom|eot)_id\|>\s*)*")
_BUILT_IN = re.compile(r"\s*(?P<name>[A-Za-z_]\w{0,199})\.call\((?P<arguments>.*)\)\s*", re.DOTALL)
_ARGUMENT = re.compile(r'\s*(?P<key>[A-Za-z_]\w{0,199})\s*=\s*"(?P<value>[^"\\]*(?:\\.[^"\\]*)*)"\s*,?', re.DOTALL)


class Llama3Format(ToolResponseFormat):
    """JSON objects with ``name`` and ``parameters``."""

    name = "llama3"
    stop: tuple[str, ...] = ()
    rule = 'Write a call as one JSON object with "name" and "parameters", and nothing else'

    def __init__(self) -> None:
        self._scanner = Scanner(re.escape(TAG), (TAG,), OBSERVATION, THOUGHTS)

    def markers(self) -> tuple[str, ...]:
        return (TAG, *OBSERVATION)

    def find_calls(self, text: str) -> list[Call]:
        return self._scanner.calls(text, self._take) if TAG in text else self._whole_turn(text)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({"name": name, "parameters": dict(arguments)}, ensure_ascii=False)

    def _whole_turn(self, text: str) -> list[Call]:
        started = _START.match(text, 0) or _START.match(text, _behind_thought(text))
        if started is None:
            return []
        objects = read_objects(text, started.end(), _BETWEEN)
        whole = _END.fullmatch(text, objects[-1].end) is not None
        return [self._call(each) for each in objects] if whole else []

    def _take(self, match: re.Match[str], cursor: Cursor) -> tuple[list[Call], int]:
        """Parse the calls from a tag to the next one."""
        behind = cursor.find(TAG, match.end())
        stop = behind if behind >= 0 else len(cursor.text)
        region = cursor.text[match.end() : stop]
        started = _START.match(region)
        if started:
            read = read_objects(region, started.end(), _BETWEEN)
        else:
            read = [JsonObject(_parse_code(_without_end(region)), 0, len(region), None)]
        calls = [self._call(each, match.end()) for each in read]
        first = calls[0]
        calls[0] = Call(first.name, first.input, match.start(), first.end, self, first.arguments, first.error)
        return calls, stop

    def _call(self, each: JsonObject, offset: int = 0) -> Call:
        call = each.call
        return Call(call.name, call.input, offset + each.start, offset + each.end, self, call.arguments, call.error)


def _behind_thought(text: str) -> int:
    closings = [text.rfind(closing) + len(closing) for closing in THOUGHTS.values() if closing in text]
    return max(closings, default=0)


def _without_end(region: str) -> str:
    """Remove the tokens that end a turn."""
    for token in ("<|eom_id|>", "<|eot_id|>"):
        region = region.rstrip().removesuffix(token)
    return region


def _parse_code(region: str) -> json_call.JsonCall:
    """Parse a call of a built-in tool, or code."""
    built_in = _BUILT_IN.fullmatch(region)
    if built_in is None:
        return json_call.JsonCall(CODE, region)
    provided, position = built_in["arguments"], 0
    arguments: dict[str, Any] = {}
    while argument := _ARGUMENT.match(provided, position):
        arguments[argument["key"]] = argument["value"]
        position = argument.end()
    if provided[position:].strip():
        return json_call.JsonCall(CODE, region)
    return json_call.JsonCall(built_in["name"], json_call.as_input(arguments), arguments)
