"""The smoke test's tool, which a server loads from this file: it counts the characters of a turn."""

from __future__ import annotations

from typing import ClassVar

from verl_tool.doctor.gpu_smoke.whole_turn import WholeTurnFormat
from verl_tool.formats import Call, Format
from verl_tool.servers.tools.base import Context, Tool, ToolResult


class CountTool(Tool):
    """Counts the characters of a turn."""

    name = "count"
    description = "Counts the characters of its input."
    example_actions: ClassVar = ("abc",)
    formats: tuple[Format, ...] = (WholeTurnFormat(),)

    async def run(self, call: Call, context: Context) -> ToolResult:
        return ToolResult(str(len(call.input)))
