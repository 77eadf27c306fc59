"""The tools' state of then, on a real server: the calls run again, compared, and forked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("verl")

from branch_runs import OPTIONS, answer, recorded, shop_tool
from live_server import LiveServer, LiveServers

from eval_service.evaluation.dataset import Problem
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.client import ToolClient
from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.replay.branch.branch_point import BranchPoint, RecordLocation
from verl_tool.replay.branch.rebuilt_state import DriftError, StateRebuilder
from verl_tool.replay.reexecute import ObservationComparison
from verl_tool.servers.tools import load_tools
from verl_tool.verification import Verification

ROW = Problem(0, ({"role": "user", "content": "How many are left?"},), "sums", {})
TURNS = ["<shop>tea</shop>", "<shop>rice</shop>", "Result=4"]


async def shop(servers: LiveServers, folder: Path, price: str = "3", *, forks: bool = False) -> LiveServer:
    return await servers.start(load_tools(str(shop_tool(folder, price, forks=forks))))


async def before_the_last(server: LiveServer) -> BranchPoint:
    return BranchPoint(RecordLocation("step_1.jsonl", 1), await recorded(server.url, TURNS), ROW, 3)


def rebuilder(client: ToolClient, *, accept_drift: bool = False) -> StateRebuilder:
    return StateRebuilder(client, ObservationComparison([]), EpisodeOptions.load(OPTIONS), accept_drift)


@pytest.mark.parametrize("forks", [True, False])
async def test_each_state_holds_what_was_bought_and_is_its_own(
    servers: LiveServers, tmp_path: Path, forks: bool
) -> None:
    server = await shop(servers, tmp_path, forks=forks)
    point = await before_the_last(server)
    (tool,) = server.app.toolset.tools
    async with ToolClient(server.url) as client:
        async with rebuilder(client).rebuild(point, 3) as states:
            assert states.forked == forks
            assert type(tool).forks == (2 if forks else 0)  # type: ignore[attr-defined]
            ids = states.trajectory_ids
            told = [await client.call(each, f"<shop>{i}</shop>", step=2) for i, each in enumerate(ids)]
            assert [each.observation for each in told] == [answer(f"[tea rice {i} at 3]") for i in range(3)]
        assert len(server.app.toolset._table) == 0


async def test_a_verified_row_has_no_forks(servers: LiveServers, tmp_path: Path) -> None:
    server = await shop(servers, tmp_path, forks=True)
    point = await before_the_last(server)
    verified = replace(
        point, row=replace(ROW, verification=Verification(files=pack_files({"test.sh": PackedFile(b"true")})))
    )
    async with ToolClient(server.url) as client, rebuilder(client).rebuild(verified, 2) as states:
        assert not states.forked


async def test_a_changed_world_is_refused_or_accepted(servers: LiveServers, tmp_path: Path) -> None:
    point = await before_the_last(await shop(servers, tmp_path))
    now = await shop(servers, tmp_path, price="5")
    async with ToolClient(now.url) as client:
        with pytest.raises(DriftError, match=r"2 of 2 calls before turn 3 .* --accept_drift") as told:
            async with rebuilder(client).rebuild(point, 2):
                pass
        assert (told.value.drifts[0].was, told.value.drifts[0].now) == (answer("[tea at 3]"), answer("[tea at 5]"))
        assert len(now.app.toolset._table) == 0
        async with rebuilder(client, accept_drift=True).rebuild(point, 2) as states:
            assert [drift.where for drift in states.drifts] == ["step_1.jsonl:1#0", "step_1.jsonl:1#1"]


async def test_a_call_without_answer_is_no_state_to_go_on_from(servers: LiveServers, tmp_path: Path) -> None:
    server = await shop(servers, tmp_path)
    point = await before_the_last(server)
    await servers.stop()
    async with ToolClient(server.url, max_retries=0) as client:
        with pytest.raises(DriftError, match="call 0 now fails") as told:
            async with rebuilder(client, accept_drift=True).rebuild(point, 1):
                pass
    assert told.value.drifts[0].now.startswith("fault unreachable")


async def test_before_the_first_call_there_is_nothing_to_run(servers: LiveServers, tmp_path: Path) -> None:
    server = await shop(servers, tmp_path)
    point = replace(await before_the_last(server), turn=1)
    async with ToolClient(server.url) as client, rebuilder(client).rebuild(point, 2) as states:
        assert len(set(states.trajectory_ids)) == 2
        assert len(server.app.toolset._table) == 0


async def test_a_fork_that_fails_otherwise_is_raised(
    servers: LiveServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await shop(servers, tmp_path, forks=True)
    point = await before_the_last(server)

    async def full(*_: str) -> None:
        raise ToolFault(FaultKind.OVERLOADED, "full", retryable=False)

    async with ToolClient(server.url) as client:
        monkeypatch.setattr(client, "fork", full)
        with pytest.raises(ToolFault, match="overloaded"):
            async with rebuilder(client).rebuild(point, 2):
                pass
    assert len(server.app.toolset._table) == 0
