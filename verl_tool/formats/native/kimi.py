"""Tool calls of Kimi-K2: ``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{json}<|tool_call_end|>``.

All calls of a turn are enclosed in ``<|tool_calls_section_begin|>`` and ``<|tool_calls_section_end|>``. The text before
the arguments is the call's id, whose number counts the calls of the conversation.

Source: the chat template of Kimi-K2-Instruct, and vLLM's parser ``kimi_k2``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verl_tool.formats import json_call
from verl_tool.formats.native.delimited import DelimitedFormat
from verl_tool.formats.tool_response import OBSERVATION

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
SHAPE = f"<|tool_call_begin|>functions.NAME:0{ARGUMENTS}{{…}}<|tool_call_end|>"


class KimiFormat(DelimitedFormat):
    """An id that contains the name, and JSON arguments."""

    name = "kimi"
    stop: tuple[str, ...] = (SECTION_END,)
    opening, closing = "<|tool_call_begin|>", "<|tool_call_end|>"
    behind = (SECTION_END, SECTION)
    rule = "Write your calls between control tokens, each with an id that holds the function's name"

    def markers(self) -> tuple[str, ...]:
        return (SECTION, SECTION_END, self.opening, self.closing, ARGUMENTS, *OBSERVATION)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        provided = json.dumps(dict(arguments), ensure_ascii=False)
        return f"{SECTION}{self.opening}functions.{name}:0{ARGUMENTS}{provided}{self.closing}{SECTION_END}"

    def _read(self, body: str) -> tuple[json_call.JsonCall, str | None]:
        head, started, payload = body.partition(ARGUMENTS)
        call_id = head.strip()
        name = call_id.partition(":")[0].removeprefix("functions.")
        if not started or not name:
            lacking = "has no name" if started else f"lacks {ARGUMENTS}"
            return json_call.JsonCall(name[:200], body, error=f"This call {lacking}. Write {SHAPE}."), None
        return json_call.parse_arguments(name, payload), call_id
