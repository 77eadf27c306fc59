"""Tool calls of Qwen3-Coder and Qwen3.5: ``<tool_call><function=name><parameter=key>value</parameter>…``.

    <tool_call>
    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

Source: the chat template of Qwen3-Coder, and vLLM's parser ``qwen3``, which also takes a ``<function=…>`` outside of
``<tool_call>``. One line end before and after each value belongs to the syntax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl_tool.formats.native.tagged_arguments import TOOL_CALL, TOOL_CALL_END, TaggedArgumentsFormat, write_arguments
from verl_tool.formats.tool_response import OBSERVATION

FUNCTION, PARAMETER = "<function=", "<parameter="


class Qwen3CoderFormat(TaggedArgumentsFormat):
    """A function and its parameters as tags."""

    name = "qwen3_coder"
    argument = re.compile(r"\s*<parameter=(?P<key>[^<>]{1,200})>")
    value_end = "</parameter>"
    ends = re.compile(rf"\s*</function>(?:\s*{TOOL_CALL_END})?")
    shape = "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"
    rule = "Write each call as a function with its parameters between tags"

    def __init__(self) -> None:
        super().__init__(rf"(?:{TOOL_CALL}\s*)?{FUNCTION}(?P<name>[^<>]{{1,200}})>", (FUNCTION,))

    def markers(self) -> tuple[str, ...]:
        return (TOOL_CALL, TOOL_CALL_END, FUNCTION, *OBSERVATION)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        parameters = write_arguments(arguments, "<parameter={key}>\n{value}\n</parameter>\n")
        return f"{TOOL_CALL}\n{FUNCTION}{name}>\n{parameters}</function>\n{TOOL_CALL_END}"

    def _value(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix("\n")
