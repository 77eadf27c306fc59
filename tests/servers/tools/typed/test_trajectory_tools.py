from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest
from live_server import LiveServers
from toy_tools import text, until

from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError
from verl_tool.protocol import FaultKind, StepRequest, StepResult
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import Context, ToolOptions, TrajectoryTools, load_tools, tool
from verl_tool.servers.tools.typed.trajectory_tools import method_tools

CART = Path(__file__).parents[1] / "data" / "cart.py"


def made(owner: type[TrajectoryTools], **options: object) -> ToolSet:
    return ToolSet([kind(**options) for kind in method_tools(owner)], call_timeout_seconds=20)


@pytest.fixture
async def cart() -> AsyncIterator[ToolSet]:
    toolset = ToolSet(load_tools(str(CART)))
    events_of_cart().clear()
    await toolset.start()
    yield toolset
    await toolset.close(grace_seconds=1)


def events_of_cart() -> list[str]:
    """What the instances of the loaded file did."""
    [module] = {kind.owner.__module__ for kind in map(type, load_tools(str(CART)))}
    return sys.modules[module].events


async def step(tools: ToolSet, trajectory: str, action: str, number: int, **more: object) -> StepResult:
    [result] = await tools.step([StepRequest(trajectory, action, number, **more)], timeout_seconds=20)
    return result


async def said(tools: ToolSet, trajectory: str, action: str, number: int, **more: object) -> str:
    result = await step(tools, trajectory, action, number, **more)
    assert result.fault is None, result.fault
    return text(result.observation)


async def test_methods_share_the_instance_of_their_trajectory(cart: ToolSet) -> None:
    assert await said(cart, "a", '<add>{"item": "bread", "count": 2}</add>', 0) == "2 items"
    assert await said(cart, "b", "<add>milk</add>", 0, extra={"items": ["oil"]}) == "2 items"
    assert await said(cart, "a", "<show/>", 1) == '["bread", "bread"]'
    assert await said(cart, "b", "<show/>", 1) == '["oil", "milk"]'
    assert await said(cart, "a", "<drop>bread</drop>", 2) == "done"
    assert await said(cart, "a", "<remove>fish</remove>", 3) == "Error: fish is not in the cart of step 3"
    assert await said(cart, "a", "<show/>", 3 + 1) == '["bread"]'
    assert cart._live_by_tool() == {"add": 2, "show": 2, "remove": 1}
    for name in "ab":
        await cart.step([StepRequest(name, "", finish=True)])
    assert events_of_cart() == ["setup a", "setup b", "teardown a bread", "teardown b oil,milk"]


async def test_an_instance_that_copies_itself_is_forked(cart: ToolSet) -> None:
    await said(cart, "a", "<add>bread</add>", 0)
    assert (await cart.fork("a", "b")).fault is None
    assert await said(cart, "b", "<add>milk</add>", 1) == "2 items"
    assert await said(cart, "a", "<show/>", 1) == '["bread"]'
    refused = (await cart.fork("a", "c")).fault
    assert refused is not None
    assert "serves 2 trajectories at once (max_live)" in refused.message
    for name in "ab":
        await cart.step([StepRequest(name, "", finish=True)])
    assert events_of_cart() == ["setup a", "teardown a bread", "teardown fork of a bread,milk"]


async def test_an_instance_that_says_nothing_of_forks_is_not_forked() -> None:
    class Plain(TrajectoryTools):
        @tool
        async def ping(self) -> str:
            """Answers."""
            return "pong"

    class Careless(Plain):
        async def fork(self) -> TrajectoryTools:
            return self

    for owner, kind, words in (
        (Plain, FaultKind.NOT_FORKABLE, "Plain cannot copy"),
        (Careless, FaultKind.TOOL_CRASHED, "must return another Careless"),
    ):
        tools = made(owner)
        await tools.start()
        await said(tools, "a", "<ping/>", 0)
        fault = (await tools.fork("a", "b")).fault
        assert fault is not None
        assert fault.kind is kind
        assert words in fault.message
        assert tools.trajectories() == ["a"]
        await tools.close(grace_seconds=1)


async def test_a_trajectory_too_many_is_overloaded_until_one_ends(cart: ToolSet) -> None:
    for name in "ab":
        await said(cart, name, "<show/>", 0)
    refused = await step(cart, "c", "<show/>", 0)
    assert refused.fault is not None
    assert (refused.fault.kind, refused.fault.retryable) == (FaultKind.OVERLOADED, True)
    assert "serves 2 trajectories at once (max_live)" in refused.fault.message
    await cart.step([StepRequest("a", "", finish=True)])
    assert await said(cart, "c", "<show/>", 0) == "[]"


async def test_an_idle_trajectory_is_torn_down_and_lost() -> None:
    [owner] = {kind.owner for kind in map(type, load_tools(str(CART)))}
    events_of_cart().clear()
    cart = made(type("Brief", (owner,), {"ttl_seconds": 0.2}))
    await cart.start()
    assert await said(cart, "a", "<add>bread</add>", 0) == "1 items"
    await until(lambda: "teardown a bread" in events_of_cart())
    assert len(cart) == 0
    for number in (1, 0):
        lost = await step(cart, "a", "<show/>", number)
        assert lost.fault is not None
        assert (lost.fault.kind, lost.fault.retryable) == (FaultKind.STATE_LOST, False)
        assert "idle for more than 0.2 s" in lost.fault.message
    assert events_of_cart() == ["setup a", "teardown a bread"]
    await cart.close(grace_seconds=1)


async def test_a_server_that_stops_tears_all_down(cart: ToolSet) -> None:
    await said(cart, "a", "<add>bread</add>", 0)
    await cart.close(grace_seconds=1)
    assert events_of_cart() == ["setup a", "teardown a bread"]


async def test_a_live_server_serves_them_all_from_one_file() -> None:
    servers = LiveServers()
    try:
        live = await servers.start(load_tools(str(CART)))
        async with ToolClient(live.url) as client:
            assert [described.name for described in await client.tools()] == ["add", "show", "remove"]
            assert all(described.stateful for described in await client.tools())
            call = '<tool_call>{"name": "add", "arguments": {"item": "bread", "count": "2"}}</tool_call>'
            first = await client.call("t", call, step=0)
            assert "2 items" in first.observation
            wrong = await client.call("t", call.replace("count", "number"), step=1)
            assert "wrong arguments for add(item, count=1): number: there is no such argument" in wrong.observation
            assert (wrong.valid, wrong.fault) == (False, None)
            assert '["bread", "bread"]' in (await client.call("t", "<show/>", step=2)).observation
    finally:
        await servers.stop()


class Fragile(TrajectoryTools):
    """Its set-up and its methods fail as they are told."""

    max_live = 1
    log: ClassVar[list[str]] = []

    def setup(self, trajectory: Context) -> None:
        self.log.append("setup")
        if trajectory.extra.get("fail") == "exit":
            raise SystemExit(2)
        if trajectory.extra.get("fail") == "late":
            threading.Event().wait(0.5)
            self.log.append("set up")
            return
        if trajectory.extra.get("fail"):
            raise OSError("no browser")

    def teardown(self) -> None:
        self.log.append("teardown")

    @tool
    def wait(self, seconds: float) -> str:
        """Waits."""
        self.log.append("wait")
        threading.Event().wait(seconds)
        self.log.append("waited")
        return "waited"


@pytest.fixture
def log() -> list[str]:
    Fragile.log.clear()
    return Fragile.log


@pytest.mark.parametrize("fail", ["yes", "exit"])
async def test_a_set_up_that_fails_is_a_fault_is_torn_down_and_keeps_no_place(log: list[str], fail: str) -> None:
    tools = made(Fragile)
    for name in "ab":
        failed = await step(tools, name, "<wait>0</wait>", 0, extra={"fail": fail})
        assert failed.fault is not None
        assert failed.fault.kind is FaultKind.TOOL_CRASHED
    assert log == ["setup", "teardown"] * 2
    assert await said(tools, "c", "<wait>0</wait>", 0) == "waited"
    await tools.close()


async def test_a_method_that_outlasts_its_call_ends_before_the_next_one_begins(log: list[str]) -> None:
    tools = ToolSet([kind() for kind in method_tools(Fragile)], call_timeout_seconds=0.3)
    late = await step(tools, "a", "<wait>0.5</wait>", 0)
    assert late.fault is not None
    assert late.fault.kind is FaultKind.TIMEOUT
    await tools.step([StepRequest("a", "", finish=True)])
    assert log == ["setup", "wait", "waited", "teardown"]
    await tools.close()


async def test_a_set_up_that_outlasts_its_call_is_torn_down(log: list[str]) -> None:
    tools = ToolSet([kind() for kind in method_tools(Fragile)], call_timeout_seconds=0.3)
    late = await step(tools, "a", "<wait>0</wait>", 0, extra={"fail": "late"})
    assert late.fault is not None
    assert late.fault.kind is FaultKind.TIMEOUT
    assert log == ["setup", "set up", "teardown"]
    assert await said(tools, "b", "<wait>0</wait>", 0) == "waited"
    await tools.close()


class Deadlines(TrajectoryTools):
    class Options(ToolOptions):
        size: int = 3

    options: Options

    async def setup(self, trajectory: Context) -> None:
        self.made_at = trajectory.step

    @tool
    async def tell(self, context: Context) -> list[object]:
        """Tells."""
        left = (context.deadline or 0) - time.monotonic()
        return [self.made_at, context.step, 15 < left <= 20, context.is_last_step, self.options.size]


async def test_the_context_and_the_options_are_known() -> None:
    tools = made(Deadlines, size=4)
    assert await said(tools, "a", "<tell/>", 0) == "[0, 0, true, false, 4]"
    assert await said(tools, "a", "<tell/>", 1, is_last_step=True) == "[0, 1, true, true, 4]"
    await tools.close()


class NoTool(TrajectoryTools):
    async def add(self, item: str) -> str:
        return item


class Shared(Deadlines):
    PRICES = {"bread": 2}  # noqa: RUF012
    items: list[str] = []  # noqa: RUF012


class NoSetup(Deadlines):
    async def setup(self) -> None: ...


class WithoutSelf(Deadlines):
    @tool
    async def tell(item: str) -> str:
        """Tells."""
        return item


class Static(Deadlines):
    @staticmethod
    @tool
    def tell(item: str) -> str:
        """Tells."""
        return item


class NeedsMore(Deadlines):
    def __init__(self, size: int) -> None: ...


class OwnOptions(Deadlines):
    @tool
    async def tell(self, options: ToolOptions) -> str:
        """Tells."""
        return ""


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        (NoTool, "NoTool has no tool; decorate a method with @tool"),
        (Shared, "Shared.items is a list that all trajectories would share; make it in setup"),
        (WithoutSelf, "WithoutSelf.tell is a method; write self before its arguments"),
        (Static, "Static.tell is a tool without an instance; write it as a method with self"),
        (NoSetup, r"NoSetup.setup cannot be called: .*; write it as setup\(self, trajectory\)"),
        (NeedsMore, r"NeedsMore.__init__ cannot be called: .*size.*; write it as __init__\(self\)"),
        (OwnOptions, r"tool tell takes its options as 'options'; set OwnOptions.Options and read self.options"),
    ],
)
def test_what_cannot_serve_is_refused_in_words_for_its_author(owner: type[TrajectoryTools], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        method_tools(owner)


@pytest.mark.parametrize(("name", "value"), [("max_live", 0), ("ttl_seconds", -1), ("max_live", "many")])
def test_limits_must_be_above_0(name: str, value: object) -> None:
    owner = type("Bad", (Deadlines,), {name: value})
    with pytest.raises(ConfigError, match=f"tool tell has {name}={value!r}; it must be a number above 0"):
        method_tools(owner)[0]()


async def test_different_trajectories_run_at_the_same_time() -> None:
    class Meeting(TrajectoryTools):
        barrier = threading.Barrier(2, timeout=20)

        @tool
        def meet(self) -> str:
            """Waits for the other."""
            self.barrier.wait()
            return "met"

    tools = made(Meeting)
    assert await asyncio.gather(said(tools, "a", "<meet/>", 0), said(tools, "b", "<meet/>", 0)) == ["met", "met"]
    await tools.close()


class Counting(TrajectoryTools):
    """What the two below share."""

    @classmethod
    def shared(cls) -> type[TrajectoryTools]:
        return Counting

    async def setup(self, trajectory: Context) -> None:
        self.count = 0


class Up(Counting):
    @tool
    async def up(self) -> int:
        """Count up."""
        self.count += 1
        return self.count


class UpMuch(Counting):
    class Options(ToolOptions):
        step: int = 10

    options: Options

    @tool
    async def up_much(self) -> int:
        """Count up by many."""
        self.count += self.options.step
        return self.count


async def test_classes_that_share_an_instance_have_their_own_options() -> None:
    tools = ToolSet([*(kind() for kind in method_tools(Up)), *(kind(step=5) for kind in method_tools(UpMuch))])
    answers = [await said(tools, "a", f"<{name}/>", step) for step, name in enumerate(("up", "up_much", "up"))]
    assert answers == ["1", "6", "7"]
