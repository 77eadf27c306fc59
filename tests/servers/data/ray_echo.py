"""A stateless tool for tests: takes a while, then says what it was given and which process ran it."""

from __future__ import annotations

import asyncio
import os

from verl_tool.formats import Call
from verl_tool.servers.tools.base import Context, Tool, ToolResult


class RayEcho(Tool):
    name = "ray_echo"
    description = "Repeats a text after 20 milliseconds, or after as many seconds as the text says behind a colon."
    example_actions = ("<ray_echo>hello</ray_echo>",)

    async def run(self, call: Call, context: Context) -> ToolResult:
        text, _, seconds = call.input.partition(":")
        await asyncio.sleep(float(seconds or 0.02))
        return ToolResult(f"{text}@{os.getpid()}")
