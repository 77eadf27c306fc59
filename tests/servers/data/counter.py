"""A stateful tool for tests: counts the calls of each trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from verl_tool.formats import Call
from verl_tool.servers.tools.base import Context, Tool, ToolResult


class Counter(Tool):
    """``<counter>`` answers how often this trajectory has called it; ``<counter>0.2</counter>`` takes that long."""

    name = "counter"
    description = "Counts this trajectory's calls."
    example_actions = ("<counter></counter>",)
    stateful: ClassVar[bool] = True

    async def create_state(self, trajectory_id: str, extra: Mapping[str, Any]) -> dict[str, int]:
        return {"count": 0}

    async def run(self, call: Call, context: Context) -> ToolResult:
        seconds = float(call.input.strip() or 0)
        if seconds:
            await asyncio.sleep(seconds)
        context.state["count"] += 1
        return ToolResult(str(context.state["count"]))
