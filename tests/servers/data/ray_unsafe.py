"""A tool for tests that refuses to start."""

from __future__ import annotations

from verl_tool.errors import IsolationError
from verl_tool.formats import Call
from verl_tool.servers.tools.base import Context, Tool, ToolResult


class RayUnsafe(Tool):
    name = "ray_unsafe"
    description = "Never serves."

    async def start(self) -> None:
        raise IsolationError("no isolation on Sundays; come back on Monday")

    async def run(self, call: Call, context: Context) -> ToolResult:
        return ToolResult()
