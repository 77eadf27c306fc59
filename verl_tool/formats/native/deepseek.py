"""Tool calls of DeepSeek V3, R1 and V3.1, between control tokens.

    V3, R1: <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, then a fenced JSON object, <｜tool▁call▁end｜>
    V3.1:   <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{json}<｜tool▁call▁end｜>

All calls of a turn are enclosed in ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>``.

Source: the chat templates of DeepSeek-V3, DeepSeek-R1-0528 and DeepSeek-V3.1, and vLLM's parsers ``deepseek_v3`` and
``deepseek_v31``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from verl_tool.formats import json_call
from verl_tool.formats.native.delimited import DelimitedFormat
from verl_tool.formats.tool_response import OBSERVATION

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
SHAPE = f"<｜tool▁call▁begin｜>NAME{SEPARATOR}{{…}}<｜tool▁call▁end｜>"
_NAME = re.compile(r"\s*([\w.-]{1,200})[ \t]*(?:\n|$)")
_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(?P<json>.*)\n[ \t]*```\s*", re.DOTALL)


class DeepSeekFormat(DelimitedFormat):
    """A name and JSON arguments, which are in a code fence in V3 and R1."""

    name = "deepseek"
    stop: tuple[str, ...] = (SECTION_END,)
    opening, closing = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    behind = (SECTION_END, SECTION)
    rule = "Write your calls between control tokens, each with the function's name and its arguments as JSON"

    def markers(self) -> tuple[str, ...]:
        return (SECTION, SECTION_END, self.opening, self.closing, SEPARATOR, *OBSERVATION)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        provided = json.dumps(dict(arguments), ensure_ascii=False)
        return f"{SECTION}{self.opening}{name}{SEPARATOR}{provided}{self.closing}{SECTION_END}"

    def _read(self, body: str) -> tuple[json_call.JsonCall, str | None]:
        head, separated, rest = body.partition(SEPARATOR)
        name, payload = head.strip(), rest
        older = _NAME.match(rest)
        if older and (name == "function" or "```" in rest):
            name, payload = older[1], _unfenced(rest[older.end() :])
        if not separated or not name:
            lacking = "has no name" if separated else f"lacks {SEPARATOR}"
            return json_call.JsonCall(name[:200], body, error=f"This call {lacking}. Write {SHAPE}."), None
        return json_call.parse_arguments(name, payload), None


def _unfenced(text: str) -> str:
    fenced = _FENCED.fullmatch(text)
    return fenced["json"] if fenced else text
