"""The command as it is run: a real model of random weights, a real tool server, stored branches and values."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer

pytest.importorskip("verl")
pytest.importorskip("transformers")

from branch_runs import answer, authors, branch_run, recorded, shop_tool
from live_server import LiveServers
from typer.testing import CliRunner, Result

from eval_service.evaluation.record import Record, write_records
from verl_tool.agent_loop.trajectory import read_jsonl
from verl_tool.replay.branch.branch_cli import command
from verl_tool.replay.stored import StoredRun
from verl_tool.servers.tools import load_tools

pytestmark = pytest.mark.slow

TURNS = ["<shop>tea</shop>", "<shop>rice</shop>", "Result=3"]
SHORT = "data.max_response_length=128"


async def branched(run: Path, *arguments: object) -> Result:
    """The command, in a thread: the tool server runs in the event loop of the test."""
    app = typer.Typer()
    app.command()(command)
    told = [str(run), *map(str, arguments)]
    return await asyncio.to_thread(CliRunner().invoke, app, told, env={"COLUMNS": "200"})


async def a_run(servers: LiveServers, folder: Path, *overrides: str, name: str = "step_1") -> tuple[Path, str]:
    url = (await servers.start(load_tools(str(shop_tool(folder, forks=True))))).url
    made = await recorded(url, TURNS)
    return branch_run(folder, [made, replace(made, trajectory_id="other")], SHORT, *overrides, name=name), url


async def test_branches_are_stored_graded_and_gone_on_from_again(servers: LiveServers, tmp_path: Path) -> None:
    run, url = await a_run(servers, tmp_path)
    before = (run / "trajectories/step_1.jsonl").read_bytes()
    edit = ("--turn", 2, "--action", "Result=4", "--tool_server_url", url)
    result = await branched(run, "step_1.jsonl:2", *edit, "--samples", 2)
    assert result.exit_code == 0, result.output
    assert "step_1.2.jsonl, lines 1 to 2; mean score 1.000 ± 0.000; step_1.jsonl:2 itself: 0.000" in result.output
    parent = list(read_jsonl(run / "trajectories/step_1.jsonl"))[1]
    for made in read_jsonl(run / "branches/step_1.2.jsonl"):
        assert made.segments[:3] == parent.segments[:3]
        assert (authors(made), made.reward, made.extra["reward_extra_info"]["acc"]) == ("mtM", 1.0, 1.0)
        told = made.extra["branch"]
        assert (told["file"], told["line"], told["trajectory_id"]) == ("step_1.jsonl", 2, "other")
        assert (told["turn"], told["edited"], told["text"]) == (2, "action", "Result=4")
    again = await branched(run, "branches/step_1.2.jsonl:1", "--turn", 2, "--tool_server_url", url)
    assert again.exit_code == 0, again.output
    (deeper,) = read_jsonl(run / "branches/step_1.2.1.jsonl")
    assert deeper.segments[:3] == parent.segments[:3]
    assert deeper.extra["branch"]["file"] == "branches/step_1.2.jsonl"
    # The run itself is as it was, for all who read it.
    assert (run / "trajectories/step_1.jsonl").read_bytes() == before
    assert len(list(StoredRun(run))) == 2


async def test_values_of_every_turn_are_printed_and_stored(servers: LiveServers, tmp_path: Path) -> None:
    run, url = await a_run(servers, tmp_path)
    result = await branched(run, "step_1.jsonl:1", "--values", "--samples", 2, "--tool_server_url", url)
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"0\.000 ± 0\.000", result.output)) == 6
    told = json.loads((run / "branches/step_1.1.values.json").read_text())
    assert [(turn["turn"], turn["samples"]) for turn in told["turns"]] == [(1, 2), (2, 2), (3, 2)]
    made = list(read_jsonl(run / "branches/step_1.1.jsonl"))
    assert [each.extra["branch"]["turn"] for each in made] == [1, 1, 2, 2, 3, 3]
    assert [each.extra["branch"]["forked"] for each in made] == [False, False, False, True, False, True]


async def test_a_world_that_has_changed_is_refused_with_the_difference(servers: LiveServers, tmp_path: Path) -> None:
    run, _ = await a_run(servers, tmp_path)
    now = (await servers.start(load_tools(str(shop_tool(tmp_path, "5"))))).url
    asked = ("step_1.jsonl:1", "--turn", 2, "--tool_server_url", now)
    result = await branched(run, *asked)
    assert result.exit_code == 1
    assert "[tea at 3]" in result.output
    assert "[tea at 5]" in result.output
    assert not (run / "branches").exists()
    accepted = await branched(run, *asked, "--accept_drift")
    assert accepted.exit_code == 0, accepted.output
    (made,) = read_jsonl(run / "branches/step_1.1.jsonl")
    assert [each["now"] for each in made.extra["branch"]["drift"]] == [answer("[tea at 5]")]


async def test_what_cannot_be_done_is_told_in_a_sentence(servers: LiveServers, tmp_path: Path) -> None:
    run, url = await a_run(servers, tmp_path, name="validation_1")
    for arguments, words in [
        (("validation_1.jsonl:1",), "give --turn K"),
        (("validation_1.jsonl:1", "--turn", 1, "--values"), "leave out --turn"),
        (("validation_1.jsonl:1", "--turn", 1, "--action", "a", "--observation", "b"), "not both"),
        (("validation_1.jsonl:9", "--turn", 1), "no trajectory at line 9"),
        (("step_7.jsonl:1", "--turn", 1), "no file 'step_7.jsonl'; it has"),
        (("../x.jsonl:1", "--turn", 1), "is not FILE:LINE"),
        (("validation_1.jsonl:1", "--turn", 1, "--model", tmp_path), "no config.json"),
        (("validation_1.jsonl:1", "--turn", 1), "names no tool server"),
        (
            ("validation_1.jsonl:1", "--turn", 1, "--endpoint", "nowhere", "--tool_server_url", url),
            "begin it with http",
        ),
    ]:
        result = await branched(run, *arguments)
        assert result.exit_code == 2, result.output
        assert words in " ".join(result.output.split()), result.output
    cold = await branched(run, "validation_1.jsonl:1", "--turn", 1, "--samples", 2, "--temperature", 0)
    assert "2 continuations would be equal; give --temperature" in " ".join(cold.output.split())
    assert not (run / "branches").exists()


async def test_an_answer_of_an_evaluation_is_gone_on_from_with_the_training_behind_it(
    servers: LiveServers, tmp_path: Path
) -> None:
    run, url = await a_run(servers, tmp_path)
    (made, _) = read_jsonl(run / "trajectories/step_1.jsonl")
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    write_records(evaluation / "records.jsonl", [Record(0, 0, "d", error="gone"), Record(0, 0, "d", trajectory=made)])
    asked = ("records.jsonl:2", "--turn", 2, "--action", "Result=4", "--tool_server_url", url)
    untold = await branched(evaluation, *asked, "--data", tmp_path / "train.jsonl")
    assert (untold.exit_code, "give --from_run" in " ".join(untold.output.split())) == (2, True)
    result = await branched(evaluation, *asked, "--data", tmp_path / "train.jsonl", "--from_run", run)
    assert result.exit_code == 0, result.output
    (branch,) = read_jsonl(evaluation / "branches/records.2.jsonl")
    assert (branch.reward, branch.extra["branch"]["file"]) == (1.0, "records.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_interrupt_leaves_nothing_behind(servers: LiveServers, tmp_path: Path) -> None:
    """Neither a file nor a state on the tool server, though some of the samples have far to go."""
    server = await servers.start(load_tools(str(shop_tool(tmp_path, forks=True))))
    run = branch_run(tmp_path, [await recorded(server.url, TURNS)], "data.max_response_length=100000")
    asked = [str(run), "step_1.jsonl:1", "--turn", "2", "--samples", "32", "--tool_server_url", server.url]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "verl_tool.replay.branch", *asked),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        for _ in range(900):
            if len(server.app.toolset._table) >= 2:
                break
            await asyncio.sleep(0.1)
        assert len(server.app.toolset._table) >= 2
        await asyncio.sleep(0.5)  # the other forks are made, and most samples are under way
        os.killpg(process.pid, signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 30) != 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert len(server.app.toolset._table) == 0
    assert not (run / "branches").exists()
