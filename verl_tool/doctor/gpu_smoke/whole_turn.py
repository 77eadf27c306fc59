"""A tool-call format for random models: whatever they write is a call."""

from __future__ import annotations

from collections.abc import Sequence

from verl_tool.formats import Call
from verl_tool.protocol import ToolDescription

STOPS = ("e", "a")
"""A turn ends at these."""


class WholeTurnFormat:
    """The whole text is one call of `count`."""

    name = "whole_turn"
    stop: tuple[str, ...] = STOPS
    observation: tuple[str, str] | None = ("[count:", "]")

    def markers(self) -> tuple[str, ...]:
        return ("[count:",)

    def find_calls(self, text: str) -> list[Call]:
        return [Call("count", text, 0, len(text), self)]

    def render(self, output: str, call: Call | None = None) -> str:
        return f"[count:{output}]"

    def usage(self, tools: Sequence[ToolDescription]) -> str:
        return "Whatever you write is a call of count."
