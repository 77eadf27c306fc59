"""Tool calls of GLM-4.5 and later: ``<tool_call>name``, then ``<arg_key>key</arg_key><arg_value>value</arg_value>``.

    <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>
    </tool_call>

Several calls follow each other. Then the model writes ``<|observation|>``, which ends its turn.

Source: the chat templates of GLM-4.5 and GLM-4.7, and vLLM's parser ``glm47_moe``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl_tool.formats.native.tagged_arguments import TOOL_CALL, TOOL_CALL_END, TaggedArgumentsFormat, write_arguments
from verl_tool.formats.tool_response import OBSERVATION

KEY = "<arg_key>"


class GlmFormat(TaggedArgumentsFormat):
    """A name, and pairs of keys and values."""

    name = "glm"
    stop: tuple[str, ...] = ("<|observation|>",)
    argument = re.compile(r"\s*<arg_key>(?P<key>[^<>]{1,200})</arg_key>\s*<arg_value>")
    value_end = "</arg_value>"
    ends = re.compile(rf"\s*{TOOL_CALL_END}")
    shape = "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"
    rule = "Write each call as a name with its arguments between tags"

    def __init__(self) -> None:
        super().__init__(rf"{TOOL_CALL}\s*(?P<name>[\w.-]{{1,200}})(?=\s*<(?:arg_key|/tool_call)>)", (TOOL_CALL,))

    def markers(self) -> tuple[str, ...]:
        return (TOOL_CALL, TOOL_CALL_END, KEY, *OBSERVATION)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        pairs = write_arguments(arguments, "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
        return f"{TOOL_CALL}{name}\n{pairs}{TOOL_CALL_END}"
