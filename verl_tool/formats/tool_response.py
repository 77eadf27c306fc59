"""Observations between ``<tool_response>`` and ``</tool_response>``, for chat models that are trained on tools.

With ``mtrl_role=tool``, the loop splits them into outputs again (`outputs`) and passes each to the chat template as a
message of the role ``tool``, so that the template writes it in the model's form.
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
"""Closing tag of a call that may precede the first block, if the engine had cut it off."""


def outputs(observation: str) -> list[str] | None:
    """Return the output in each block of an observation, or None if it contains anything else.

    Outputs contain no marks of blocks, since `render` breaks them up.
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
    """Base class of formats with these observations."""

    name: str
    stop: tuple[str, ...]
    observation: tuple[str, str] | None = OBSERVATION
    rule: str
    """How to write a call, as text for a prompt."""

    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """Return the strings to claim with `markers.claim`."""

    @abstractmethod
    def find_calls(self, text: str) -> list[Call]:
        """Find all calls outside of thoughts, in order."""

    @abstractmethod
    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Write a call as a model would."""

    def write(self, name: str, payload: str) -> str:
        """Write a call with `payload` as its argument ``input``."""
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
        """Return one of the tools' examples in this format, or else write a call of the first tool."""
        own = (action for tool in tools for action in tool.example_actions if self.find_calls(action))
        return next(own, None) or self.write(tools[0].name if tools else "name", "…")


def _as_function(tool: ToolDescription) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
