"""Ends a trajectory: ``<finish>42</finish>``, ``<finish/>``, ``Result=42<submit>``, ``{"name": "finish"}``.

The server then frees what every tool held for the trajectory.
"""

from __future__ import annotations

from typing import ClassVar

from verl_tool.formats import Call
from verl_tool.servers.tools.base import Context, Tool, ToolResult


class FinishTool(Tool):
    """Takes the model's word that it is done; a payload is its answer, which the reward reads from the model's text."""

    name = "finish"
    aliases = ("submit",)
    description = "Ends the task. Call it once, when the answer is final."
    parameters: ClassVar = {"type": "object", "properties": {"answer": {"type": "string"}}}
    example_actions = (
        "<finish>42</finish>",
        "<finish/>",
        "Result=42<submit>",
        '<tool_call>\n{"name": "finish", "arguments": {"answer": "42"}}\n</tool_call>',
        '{"name": "finish"}',
    )

    async def run(self, call: Call, context: Context) -> ToolResult:
        return ToolResult(done=True)
