"""Run by the Python of openenv 0.10: its own clients play our environment at the URL of the first argument."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openenv.core import GenericEnvClient
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.mcp_client import MCPToolClient

URL, TOOL, ARGUMENTS, ANSWER = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]


def play_generic(seen: dict[str, Any]) -> None:
    """In synchronous code."""
    with GenericEnvClient(base_url=URL).sync() as env:
        seen["reset"] = env.reset(index=0).observation
        step = env.step({"type": "call_tool", "tool_name": TOOL, "arguments": ARGUMENTS})
        seen["step"] = step.observation
        end = env.step({"type": "call_tool", "tool_name": "submit_answer", "arguments": {"answer": ANSWER}})
        seen["end"] = [end.reward, end.done]
        seen["state"] = env.state()
        try:
            env.step({"type": "guess"})
        except RuntimeError as error:
            seen["error"] = str(error)


async def play_tools(seen: dict[str, Any]) -> None:
    async with MCPToolClient(base_url=URL) as env:
        await env.reset(index=0)
        seen["tools"] = [tool.name for tool in await env.list_tools()]
        seen["called"] = await env.call_tool(TOOL, **ARGUMENTS)
        end = await env.step(CallToolAction(tool_name="submit_answer", arguments={"answer": ANSWER}))
        seen["tools_end"] = [end.reward, end.done]
        try:
            await env.call_tool("nope")
        except RuntimeError as error:
            seen["unknown"] = str(error)


seen: dict[str, Any] = {}
play_generic(seen)
asyncio.run(play_tools(seen))
print(json.dumps(seen))
