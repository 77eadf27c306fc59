"""Observations between ``<tool_response>`` and ``</tool_response>``: those of chat models that are trained on tools.

A chat template writes such an observation in its model's own way. With ``mtrl_role=tool`` the loop takes the blocks
apart again (`outputs`) and gives each to the template as a message of the role ``tool``.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from verl_tool.formats import markers
from verl_tool.formats.base import Call
from verl_tool.protocol import ToolDescription

OBSERVATION = ("<tool_response>", "</tool_response>")
_BLOCK = re.compile(rf"\s*{OBSERVATION[0]}\n?(?P<output>.*?)\n?{OBSERVATION[1]}\s*", re.DOTALL)
_CALL_END = re.compile(r"\s*</tool_call>")
"""What a format of such tags may have put before the first block, because the engine cut it off."""


def outputs(observation: str) -> list[str] | None:
    """What stands in each block of an observation; None if it is not made of such blocks alone.

    An output holds no mark of a block, since `render` broke those up.
    """
    found: list[str] = []
    supplied = _CALL_END.match(observation)
    position = supplied.end() if supplied else 0
    while position < len(observation):
        match = _BLOCK.match(observation, position)
        if match is None:
            return None
        found.append(match["output"])
        position = match.end()
    return found or None


class ToolResponseFormat(ABC):
    """What the formats with such observations have in common."""

    name: str
    stop: tuple[str, ...]
    observation: tuple[str, str] | None = OBSERVATION
    rule: str
    """How a call is written, in words for a prompt."""

    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """The strings that `markers.claim` should know."""

    @abstractmethod
    def find_calls(self, text: str) -> list[Call]:
        """All calls, in order; none of those in thoughts."""

    @abstractmethod
    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as a model would write it."""

    def write(self, name: str, payload: str) -> str:
        """A call with `payload` as its argument ``input``."""
        return self.write_call(name, {"input": payload})

    def render(self, output: str, call: Call | None = None) -> str:
        missing = call.missing if call else ""
        return f"{missing}\n{OBSERVATION[0]}\n{markers.escape_markers(output)}\n{OBSERVATION[1]}\n"

    def usage(self, tools: Sequence[ToolDescription]) -> str:
        functions = "\n".join(json.dumps(_as_function(tool), ensure_ascii=False) for tool in tools)
        return (
            "You can call functions. Their signatures, as JSON schemas:\n"
            f"<tools>\n{functions}\n</tools>\n"
            f"{self.rule}, such as\n{self._example(tools)}\n"
            f"and stop there. The result comes back between {OBSERVATION[0]} and {OBSERVATION[1]}; go on from it."
        )

    def _example(self, tools: Sequence[ToolDescription]) -> str:
        """An example of the tools' own in this format, or a call of the first of them."""
        own = (action for tool in tools for action in tool.example_actions if self.find_calls(action))
        return next(own, None) or self.write(tools[0].name if tools else "name", "…")


def _as_function(tool: ToolDescription) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
