"""Calls from a program instead of a model: the whole action is ``{"name": "calculator", "arguments": {…}}``, and the
observation is the tool's unchanged text. Requests select this format with `protocol.DIRECT_FIELD`."""

from __future__ import annotations

from collections.abc import Sequence

from verl_tool.formats import json_call
from verl_tool.formats.base import Call
from verl_tool.protocol import ToolDescription


class DirectFormat:
    """Format in which the whole text is the call."""

    name = "direct"
    stop: tuple[str, ...] = ()
    observation: tuple[str, str] | None = None

    def markers(self) -> tuple[str, ...]:
        """Return nothing: no model reads these observations directly."""
        return ()

    def find_calls(self, text: str) -> list[Call]:
        parsed = json_call.parse(text)
        return [Call(parsed.name, parsed.input, 0, len(text), self, parsed.arguments, parsed.error)]

    def render(self, output: str, call: Call | None = None) -> str:
        return output

    def usage(self, tools: Sequence[ToolDescription]) -> str:
        """Return an empty text: models are not taught this format."""
        return ""


DIRECT = DirectFormat()
