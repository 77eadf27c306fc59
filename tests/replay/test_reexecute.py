"""Stored calls run again on a real server: what the world answers now, compared as the tools say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from live_server import LiveServers
from stored_runs import trajectory

from eval_service.evaluation.dataset import Problem
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.trajectory import CallRecord, Trajectory
from verl_tool.client import ToolClient
from verl_tool.protocol import FORMATS_FIELD, TOOLS_FIELD, TURNS_LEFT_FIELD, Fault, FaultKind
from verl_tool.replay.reexecute import ReexecutionReport, build_call_extras, reexecute
from verl_tool.replay.stored import Grading, StoredAnswer
from verl_tool.servers.tools import load_tools

SHOP = """
import re, time
from verl_tool.servers.tools.base import Tool, ToolResult

class Shop(Tool):
    name = "shop"
    description = "Sells."
    stateful = True
    aliases = ("store",)
    price = "PRICE"

    @classmethod
    def comparable(cls, observation):
        return re.sub(r"at [0-9.]+", "at some time", observation)

    async def create_state(self, trajectory_id, extra):
        return {"sold": 0, "customer": extra.get("customer", "nobody")}

    async def run(self, call, context):
        context.state["sold"] += 1
        sold, customer = context.state["sold"], context.state["customer"]
        return ToolResult(f"{customer} bought {sold} for {self.price} at {time.time()}")
"""
ROW = Problem(0, ({"role": "user", "content": "Buy."},), "shop", {}, tools_kwargs={"customer": "Ann"})
BUY = "<shop>one</shop>"


async def shop(servers: LiveServers, tmp_path: Path, price: str) -> tuple[str, str]:
    """The URL of a server of the shop, and the path of the tool."""
    path = tmp_path / f"shop_{price}.py"
    path.write_text(SHOP.replace("PRICE", price))
    return (await servers.start(load_tools(str(path)))).url, str(path)


async def stored(url: str, actions: Sequence[str], **changes: Any) -> StoredAnswer:
    """A trajectory whose calls were run at `url`."""
    calls = []
    async with ToolClient(url) as client:
        for step, action in enumerate(actions):
            told = await client.call("then", action, step=step, extra=ROW.tools_kwargs)
            names = ("shop",) if told.valid else ()
            calls.append(CallRecord(step, action, told.observation, told.valid, told.done, names=names))
        await client.finish(["then"])
    made = replace(trajectory(0, "Buy.", [], None), calls=tuple(calls))
    return StoredAnswer("step_1.jsonl:4", ROW, Grading(), replace(made, **changes))


async def again(url: str, tool: str, *runs: StoredAnswer) -> ReexecutionReport:
    options = EpisodeOptions(enable_mtrl=True, max_turns=4)
    return await reexecute(runs, url, [tool], {False: options, True: options})


async def test_calls_run_again_in_their_order_with_the_rows_own_data(servers: LiveServers, tmp_path: Path) -> None:
    url, tool = await shop(servers, tmp_path, "3")
    kept = await stored(url, [BUY, BUY, "no call at all"])
    assert "Ann bought 2" in kept.trajectory.calls[1].observation  # type: ignore[union-attr]
    report = await again(url, tool, kept, kept)
    assert report.lines() == []
    assert {name: figures.calls for name, figures in report.tools.items()} == {"shop": 4, "(no tool)": 2}
    assert report.unexpected_count(set()) == 0
    assert "6 calls of 2 trajectories run again, 0 answered differently" in report.summary()


async def test_without_the_tools_own_comparison_times_are_differences(servers: LiveServers, tmp_path: Path) -> None:
    url, _ = await shop(servers, tmp_path, "3")
    assert len((await again(url, "nowhere", await stored(url, [BUY]))).drifts) == 1


async def test_a_world_that_has_changed_is_told_by_tool_with_examples(servers: LiveServers, tmp_path: Path) -> None:
    before, _ = await shop(servers, tmp_path, "3")
    now, tool = await shop(servers, tmp_path, "5")
    report = await again(now, tool, await stored(before, [BUY, BUY]))
    (drift, second) = report.drifts
    assert (drift.where, drift.tool, drift.action, second.where) == (
        "step_1.jsonl:4#0",
        "shop",
        BUY,
        "step_1.jsonl:4#1",
    )
    assert "for 3 at" in drift.excerpts[0]
    assert "for 5 at" in drift.excerpts[1]
    assert report.tools["shop"].different == 2
    known = {(each["where"], each["now"]) for each in map(json.loads, report.lines())}
    assert (report.unexpected_count(set()), report.unexpected_count(known)) == (2, 0)


async def test_a_server_without_the_tool_and_a_call_without_answer(servers: LiveServers, tmp_path: Path) -> None:
    before, tool = await shop(servers, tmp_path, "3")
    other = await servers.start(load_tools("calculator"))
    kept = await stored(before, [BUY])
    (drift,) = (await again(other.url, tool, kept)).drifts
    assert drift.now.startswith("[valid=False")
    assert kept.trajectory is not None
    fault = Fault(kind=FaultKind.TIMEOUT, message="slow", retryable=False)
    failed = replace(kept.trajectory.calls[0], fault=fault, observation="")
    report = await again(other.url, tool, replace(kept, trajectory=replace(kept.trajectory, calls=(failed,))))
    assert (report.drifts, report.without_observation) == ([], 1)


async def test_a_server_that_is_gone_is_a_difference_and_no_crash(servers: LiveServers, tmp_path: Path) -> None:
    url, tool = await shop(servers, tmp_path, "3")
    kept = await stored(url, [BUY, BUY])
    await servers.stop()
    options = EpisodeOptions(enable_mtrl=True, max_turns=4, tool_call_max_retries=0)
    report = await reexecute([kept], url, [tool], {False: options, True: options})
    assert [drift.now.split(":")[0] for drift in report.drifts] == ["fault unreachable"]
    assert report.tools["shop"].faults == 1


def calls_of(actions: Sequence[str]) -> Trajectory:
    calls = tuple(CallRecord(step, action) for step, action in enumerate(actions))
    return replace(trajectory(0, "Buy.", [], None), calls=calls)


@pytest.mark.parametrize(("actions", "left"), [(["a", "b"], [3, 2]), (["", "a"], [4, 3])])
def test_calls_are_sent_with_what_the_loop_sends(actions: list[str], left: list[int]) -> None:
    files = [{"path": "a.txt", "content": "eA=="}]
    row = replace(ROW, tools=("shop",), max_turns=3, tools_kwargs={"customer": "Ann", "workspace_files": files})
    options = EpisodeOptions(enable_mtrl=True, max_turns=9, formats=("hermes",))
    first, second = build_call_extras(calls_of(actions), row, options)
    assert [each[TURNS_LEFT_FIELD] for each in (first, second)] == left
    assert (first["workspace_files"], "workspace_files" in second) == (files, False)
    assert (second["customer"], second[TOOLS_FIELD], second[FORMATS_FIELD]) == ("Ann", ["shop"], ["hermes"])
