"""Tools for tests. `Puppet` does what its input says, so that a test reads as its own script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from PIL import Image
from recordings import ramp

from verl_tool.content.parts import ImagePart, encode_image
from verl_tool.errors import SandboxError, ToolFault, VerlToolError
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools.base import Context, Tool, ToolResult
from verl_tool.util.slots import hold_slot


def picture(red: int, size: tuple[int, int] = (4, 3)) -> ImagePart:
    """Make a small PNG of one colour."""
    return encode_image(Image.new("RGB", size, (red, 0, 0)))


class Puppet(Tool):
    """``<puppet>say x</puppet>``: the first word is the verb, and the rest its object."""

    name = "puppet"
    description = "Does what it is told."
    example_actions = ("<puppet>say hello</puppet>",)

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[str] = []
        """Inputs in the order of their starts."""
        self.ended: list[str] = []
        """Inputs of the runs that were not cancelled."""
        self.failures = 0
        """Number of further runs of ``flaky`` that fail."""
        self.sick = False

    async def check(self) -> None:
        if self.sick:
            raise VerlToolError("the puppet is sick")

    async def run(self, call: Call, context: Context) -> ToolResult:
        verb, _, rest = call.input.strip().partition(" ")
        self.runs.append(call.input.strip())
        result = await self._act(verb, rest, context)
        self.ended.append(call.input.strip())
        return result

    async def _act(self, verb: str, rest: str, context: Context) -> ToolResult:
        if verb == "sleep":
            await asyncio.sleep(float(rest))
        elif verb == "crash":
            raise RuntimeError(rest)
        elif verb == "fault":
            raise ToolFault(FaultKind.SANDBOX, rest, retryable=True)
        elif verb == "flaky" and self.failures > 0:
            self.failures -= 1
            raise SandboxError("the sandbox stumbled", retryable=True)
        return self._result(verb, rest, context)

    def _result(self, verb: str, rest: str, context: Context) -> ToolResult:
        if verb == "end":
            return ToolResult(rest, done=True)
        if verb == "reward":
            return ToolResult(rest, reward=float(rest), metrics={"rewarded": 1.0})
        if verb == "image":
            return ToolResult("an image", image=rest)
        if verb == "pictures":
            # One for each number, red in so many parts of 255.
            return ToolResult(parts=["see ", *map(picture, map(int, rest.split())), " above"])
        if verb == "sound":
            return ToolResult("a sound", audio=ramp())
        if verb == "bytes":
            return ToolResult("an object", image=object())
        if verb == "surrogate":
            return ToolResult("\ud800 and \udfff")
        if verb == "extra":
            return ToolResult(str(context.extra.get(rest)))
        return ToolResult(rest)


class Ledger(Tool):
    """Stateful: each call appends its input to the trajectory's own list and returns the list."""

    name = "ledger"
    description = "Keeps a list for each trajectory."
    example_actions = ("<ledger>bread</ledger>",)
    stateful = True

    def __init__(self) -> None:
        super().__init__()
        self.closed: list[list[str]] = []
        self.forks = 0
        self.fork_seconds = 0.0

    async def create_state(self, trajectory_id: str, extra: Mapping[str, Any]) -> list[str]:
        return []

    async def fork_state(self, state: list[str]) -> list[str]:
        self.forks += 1
        await asyncio.sleep(self.fork_seconds)
        return list(state)

    async def close_state(self, state: list[str]) -> None:
        self.closed.append(state)

    async def run(self, call: Call, context: Context) -> ToolResult:
        entry, _, seconds = call.input.partition("@")
        if seconds:
            await asyncio.sleep(float(seconds))
        context.state.append(entry)
        return ToolResult(",".join(context.state))


@asynccontextmanager
async def running(tools: Sequence[Tool], **options: Any) -> AsyncIterator[ToolSet]:
    """Run a tool set of `tools` within the block."""
    toolset = ToolSet(tools, **options)
    await toolset.start()
    try:
        yield toolset
    finally:
        await toolset.close(grace_seconds=1.0)


def text(observation: str) -> str:
    """Return the content between the tags of an observation that has one block."""
    return observation.strip().removeprefix("<result>").removesuffix("</result>").strip()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition, and fail if it does not become true in time."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


class Crowded(Puppet):
    """A puppet that plays only in its turn."""

    name = "crowded"

    def __init__(self) -> None:
        super().__init__()
        self.slots = asyncio.Semaphore(1)

    async def run(self, call: Call, context: Context) -> ToolResult:
        async with hold_slot(self.slots):
            return await super().run(call, context)
