"""The smoke test's tool, which a server loads from this file: it counts the characters of a turn, all of which is its
call, as random models write no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from verl_tool.formats import Call, Format
from verl_tool.protocol import ToolDescription
from verl_tool.servers.tools.base import Context, Tool, ToolResult

STOPS = ("e", "a")


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


class CountTool(Tool):
    name = "count"
    description = "Counts the characters of its input."
    example_actions: ClassVar = ("abc",)
    formats: tuple[Format, ...] = (WholeTurnFormat(),)

    async def run(self, call: Call, context: Context) -> ToolResult:
        return ToolResult(str(len(call.input)))
