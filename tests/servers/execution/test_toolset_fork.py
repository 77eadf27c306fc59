"""Two trajectories from one: what the second has, what is refused, and that nothing is left of a fork that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from toy_tools import Ledger, Puppet, running, text, until

from verl_tool.formats import Call
from verl_tool.protocol import FaultKind, StepRequest, StepResult
from verl_tool.servers.execution.admission import Admission
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools.base import Context, Tool, ToolResult


class Hoard(Tool):
    """Has state, and no way to copy it."""

    name = "hoard"
    description = "Keeps."
    example_actions = ("<hoard>x</hoard>",)
    stateful = True

    async def create_state(self, trajectory_id: str, extra: Mapping[str, Any]) -> object:
        return object()

    async def run(self, call: Call, context: Context) -> ToolResult:
        return ToolResult("kept")


async def noted(toolset: ToolSet, trajectory_id: str, words: str, step: int | None = None) -> str:
    [result] = await toolset.step([StepRequest(trajectory_id, f"<ledger>{words}</ledger>", step)], timeout_seconds=20)
    return result.fault.kind.value if result.fault else text(result.observation)


def kind(result: StepResult) -> FaultKind | None:
    return result.fault.kind if result.fault else None


async def test_both_go_on_from_the_same_state_and_each_step_of_either_runs_once() -> None:
    ledger = Ledger()
    async with running([Puppet(), ledger]) as toolset:
        await toolset.step([StepRequest("a", "<puppet>say hi</puppet> <ledger>x</ledger>", 0)])
        assert kind(await toolset.fork("a", "b")) is None
        for _ in range(2):
            assert await noted(toolset, "b", "y", 1) == "x,y"
            assert await noted(toolset, "a", "z", 1) == "x,z"
        assert kind(await toolset.fork("b", "c")) is None
        assert await noted(toolset, "c", "w", 2) == "x,y,w"
        assert toolset._live_by_tool() == {"puppet": 3, "ledger": 3}
        await toolset.step([StepRequest("a", "", finish=True)])
        assert await noted(toolset, "b", "v", 2) == "x,y,v"
        assert ledger.closed == [["x", "z"]]
    assert sorted(ledger.closed) == [["x", "y", "v"], ["x", "y", "w"], ["x", "z"]]


async def test_steps_from_before_the_fork_are_not_run_again() -> None:
    async with running([Ledger()]) as toolset:
        await noted(toolset, "a", "x", 0)
        await toolset.fork("a", "b")
        [result] = await toolset.step([StepRequest("b", "<ledger>x</ledger>", 0)])
        assert result.fault is not None
        assert "step 0 was run before it was forked from 'a'; its steps go on from 1" in result.fault.message
        assert await noted(toolset, "b", "y", 1) == "x,y"


async def test_a_tool_that_cannot_copy_its_state_refuses_and_nothing_is_created() -> None:
    ledger = Ledger()
    async with running([ledger, Hoard()]) as toolset:
        await noted(toolset, "a", "x", 0)
        await toolset.step([StepRequest("a", "<hoard>x</hoard>", 1)])
        refused = await toolset.fork("a", "b")
        assert refused.fault is not None
        assert (refused.fault.kind, refused.fault.retryable) == (FaultKind.NOT_FORKABLE, False)
        assert "tool hoard cannot copy" in refused.fault.message
        assert (ledger.forks, ledger.closed) == (1, [["x"]]), "the copy that was made before it is freed"
        assert toolset.trajectories() == ["a"]
        assert not toolset.knows("b")
        assert await noted(toolset, "a", "y", 2) == "x,y"
        assert await noted(toolset, "b", "z", 0) == "z", "the id is as free as before"


@pytest.mark.parametrize(
    ("source", "new", "expected"),
    [
        ("nobody", "b", FaultKind.STATE_LOST),
        ("done", "b", FaultKind.STATE_LOST),
        ("a", "a", FaultKind.BAD_REQUEST),
        ("a", "other", FaultKind.BAD_REQUEST),
    ],
)
async def test_unknown_trajectories_and_ids_in_use_are_refused(source: str, new: str, expected: FaultKind) -> None:
    async with running([Ledger(), Puppet()]) as toolset:
        for trajectory in ("a", "other", "done"):
            await noted(toolset, trajectory, "x", 0)
        await toolset.step([StepRequest("done", "<puppet>end bye</puppet>", 1)])
        before = set(toolset.trajectories())
        assert kind(await toolset.fork(source, new)) is expected
        assert set(toolset.trajectories()) == before
        assert await noted(toolset, "a", "y", 1) == "x,y"


async def test_a_lost_trajectory_is_not_forked_and_its_id_is_not_used_again() -> None:
    class Brief(Ledger):
        ttl_seconds = 0.1

    async with running([Brief(), Puppet()]) as toolset:
        await noted(toolset, "old", "x", 0)
        await until(lambda: not toolset.trajectories())
        assert kind(await toolset.fork("old", "b")) is FaultKind.STATE_LOST
        await toolset.step([StepRequest("a", "<puppet>say hi</puppet>", 0)])
        assert kind(await toolset.fork("a", "old")) is FaultKind.BAD_REQUEST
        assert await noted(toolset, "old", "x", 1) == "state_lost"


async def test_the_same_fork_asked_for_again_is_one_fork_until_something_is_sent() -> None:
    ledger = Ledger()
    ledger.fork_seconds = 0.05
    async with running([ledger]) as toolset:
        await noted(toolset, "a", "x", 0)
        results = await asyncio.gather(*(toolset.fork("a", "b") for _ in range(5)))
        assert [kind(result) for result in results] == [None] * 5
        assert ledger.forks == 1
        await noted(toolset, "a", "y", 1)
        assert kind(await toolset.fork("a", "b")) is FaultKind.BAD_REQUEST
        assert await noted(toolset, "b", "z", 1) == "x,z"


async def test_a_fork_has_what_was_sent_before_it_and_nothing_of_what_was_sent_after() -> None:
    ledger = Ledger()
    async with running([ledger]) as toolset:
        before = asyncio.create_task(noted(toolset, "a", "x@0.1", 0))
        await asyncio.sleep(0.01)
        fork = asyncio.create_task(toolset.fork("a", "b"))
        await asyncio.sleep(0.01)
        behind = asyncio.create_task(noted(toolset, "a", "y", 1))
        of_branch = asyncio.create_task(noted(toolset, "b", "z", 1))
        assert [await before, kind(await fork), await behind, await of_branch] == ["x", None, "x,y", "x,z"]


async def test_a_fork_that_takes_too_long_or_whose_client_leaves_leaves_nothing() -> None:
    ledger = Ledger()
    ledger.fork_seconds = 30.0
    async with running([ledger]) as toolset:
        await noted(toolset, "a", "x", 0)
        late = await toolset.fork("a", "b", timeout_seconds=0.05)
        assert late.fault is not None
        assert (late.fault.kind, late.fault.retryable) == (FaultKind.TIMEOUT, True)
        left = asyncio.create_task(toolset.fork("a", "c"))
        await until(lambda: ledger.forks == 2)
        left.cancel()
        await until(lambda: toolset.trajectories() == ["a"] and not toolset._running)
        ledger.fork_seconds = 0.0
        assert kind(await toolset.fork("a", "b")) is None
        assert await noted(toolset, "b", "y", 1) == "x,y"


async def test_limits_on_live_states_hold_and_a_failed_fork_takes_no_place() -> None:
    class Few(Ledger):
        max_live = 2

    async with running([few := Few()]) as toolset:
        await noted(toolset, "a", "x", 0)
        few.fork_seconds = 30.0
        assert kind(await toolset.fork("a", "b", timeout_seconds=0.05)) is FaultKind.TIMEOUT
        few.fork_seconds = 0.0
        await until(lambda: toolset.trajectories() == ["a"])
        assert kind(await toolset.fork("a", "b")) is None
        refused = await toolset.fork("a", "c")
        assert refused.fault is not None
        assert (refused.fault.kind, refused.fault.retryable) == (FaultKind.OVERLOADED, True)
        assert set(toolset.trajectories()) == {"a", "b"}


async def test_a_crash_of_a_tool_is_the_fault_of_the_fork() -> None:
    class Broken(Ledger):
        async def fork_state(self, state: list[str]) -> list[str]:
            raise KeyError("no")

    async with running([Broken()]) as toolset:
        await noted(toolset, "a", "x", 0)
        assert kind(await toolset.fork("a", "b")) is FaultKind.TOOL_CRASHED
        assert toolset.trajectories() == ["a"]


async def test_stateless_tools_have_nothing_to_copy_and_nothing_to_refuse() -> None:
    async with running([Puppet()]) as toolset:
        assert kind(await toolset.fork("a", "b")) is None
        assert len(toolset) == 0


async def test_a_server_that_stops_answers_its_forks_and_frees_all() -> None:
    ledger = Ledger()
    ledger.fork_seconds = 30.0
    toolset = ToolSet([ledger])
    await toolset.start()
    await noted(toolset, "a", "x", 0)
    fork = asyncio.create_task(toolset.fork("a", "b", admission=Admission(1, 1)))
    await until(lambda: ledger.forks == 1)
    await toolset.close(grace_seconds=0.05)
    assert kind(await fork) is FaultKind.SHUTTING_DOWN
    assert ledger.closed == [["x"]]
    assert kind(await toolset.fork("a", "c")) is FaultKind.SHUTTING_DOWN
