"""Text games as environments of the tool server, with toy games in processes of the host."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from verl_tool.environments.host.host_client import HostError
from verl_tool.environments.text_game import TextGame, read_rows
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import ENVIRONMENT_FIELD, KEEP_FIELD, VERDICT_FIELD, FaultKind, Opening, StepRequest, StepResult
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tool_config import ToolConfig
from verl_tool.servers.tools import load_tools

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
GAMES = str(Path(__file__).parents[1] / "helpers" / "toy_games.py")
GUESS, NAUGHTY, LIMITED = f"{GAMES}:Guess", f"{GAMES}:Naughty", f"{GAMES}:Limited"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tools() -> AsyncIterator[ToolSet]:
    games = [GUESS, NAUGHTY, LIMITED]
    config = {"name": "text_game", "environment": games, "max_steps": 4, "step_seconds": 2, "processes": 3}
    made = ToolSet(load_tools("text_game", ToolConfig.from_cli(json.dumps({"tools": [config]}))))
    await made.start()
    yield made
    await made.close(grace_seconds=1.0)


async def begin(tools: ToolSet, trajectory: str, **arguments: Any) -> StepResult:
    [result] = await tools.step([StepRequest(trajectory, "", 0, extra={ENVIRONMENT_FIELD: arguments})])
    return result


async def act(tools: ToolSet, trajectory: str, step: int, action: str) -> StepResult:
    [result] = await tools.step([StepRequest(trajectory, action, step, extra={KEEP_FIELD: True})])
    return result


async def finish(tools: ToolSet, trajectory: str) -> None:
    await tools.step([StepRequest(trajectory, "", finish=True)])


def opening_of(result: StepResult) -> Opening:
    assert result.opening is not None, result.fault
    return result.opening


async def test_an_episode_begins_with_the_rules_and_is_judged_by_its_rewards(tools: ToolSet) -> None:
    opening = opening_of(await begin(tools, "a", environment=GUESS, seed=5, make={"below": 2}))
    assert opening.every_turn
    assert opening.messages == [{"role": "user", "content": "Guess a number below 2."}]
    results = [await act(tools, "a", 1, "0")]
    if not results[0].done:
        results.append(await act(tools, "a", 2, "1"))
    assert (results[-1].observation, results[-1].reward, results[-1].done) == ("Right.", 1.0, True)
    assert {result.role for result in results} == {"user"}
    [verdict] = await tools.step([StepRequest("a", "", len(results) + 1, extra={VERDICT_FIELD: {}})])
    assert (verdict.reward, verdict.metrics["env_done"]) == (1.0, 1.0)
    await finish(tools, "a")


async def test_an_error_by_an_action_is_an_observation_and_steps_are_bounded(tools: ToolSet) -> None:
    opening_of(await begin(tools, "b", environment=GUESS, seed=1))
    wrong = await act(tools, "b", 1, "seven")
    assert wrong.fault is None
    assert not wrong.valid
    assert not wrong.done
    assert wrong.observation.startswith("ValueError: invalid literal")
    assert wrong.role == "user"
    assert [(await act(tools, "b", step, "99")).done for step in (2, 3, 4)] == [False, False, True]
    [verdict] = await tools.step([StepRequest("b", "", 5, extra={VERDICT_FIELD: {}})])
    assert (verdict.reward, verdict.metrics["env_done"]) == (0.0, 0.0)
    await finish(tools, "b")


@pytest.mark.parametrize(("action", "ended"), [("win", 1.0), ("late", 0.0), ("win late", 1.0)])
async def test_an_end_by_a_limit_of_the_game_is_no_end_of_the_game(tools: ToolSet, action: str, ended: float) -> None:
    opening_of(await begin(tools, action, environment=LIMITED, seed=1))
    assert (await act(tools, action, 1, action)).done
    [verdict] = await tools.step([StepRequest(action, "", 2, extra={VERDICT_FIELD: {}})])
    assert verdict.metrics["env_done"] == ended
    await finish(tools, action)


@pytest.mark.parametrize(
    ("action", "kind", "excluded"),
    [
        ("exit 1", FaultKind.TOOL_CRASHED, False),
        ("hang", FaultKind.TIMEOUT, False),
        ("kill", FaultKind.STATE_LOST, True),
    ],
)
async def test_what_an_action_did_to_the_process_counts_and_what_others_did_does_not(
    tools: ToolSet, action: str, kind: FaultKind, excluded: bool
) -> None:
    first = opening_of(await begin(tools, action, environment=NAUGHTY, seed=1)).messages[0]["content"]
    if action == "kill":
        os.kill(int(first.rpartition(" ")[2].rstrip(".")), signal.SIGKILL)
    result = await act(tools, action, 1, action)
    assert result.fault is not None
    assert result.fault.kind is kind
    assert kind.provokable is not excluded
    await finish(tools, action)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"environment": GUESS}, "the seed None"),
        ({"environment": GUESS, "seed": True}, "the seed True"),
        ({"environment": GUESS, "seed": -1}, "the seed -1"),
        ({"seed": 1}, "served"),
        ({"environment": "os:system", "seed": 1}, "'os:system'"),
        ({"environment": GUESS, "seed": 1, "make": 3}, "make=3"),
        ({"environment": GUESS, "seed": 1, "sead": 1}, "has sead"),
        ({"environment": GUESS, "seed": 1, "make": {"above": 2}}, "above"),
    ],
)
async def test_a_row_that_cannot_begin_is_a_fault_that_says_why(tools: ToolSet, arguments: dict, words: str) -> None:
    result = await begin(tools, f"bad {arguments}", **arguments)
    assert result.fault is not None
    assert result.fault.kind is FaultKind.MISCONFIGURED
    assert words in result.fault.message


async def test_more_episodes_than_processes_are_turned_away_until_one_ends(tools: ToolSet) -> None:
    ids = [f"many {number}" for number in range(4)]
    results = [await begin(tools, each, environment=GUESS, seed=1) for each in ids]
    assert [result.fault and result.fault.kind for result in results] == [None, None, None, FaultKind.OVERLOADED]
    await finish(tools, ids[0])
    opening_of(await begin(tools, "one more", environment=GUESS, seed=1))
    for each in [*ids[1:], "one more"]:
        await finish(tools, each)


async def test_a_host_that_was_killed_is_started_again(tools: ToolSet) -> None:
    game = TextGame(environment=GUESS)
    await game.start()
    session, _ = await game.begin("t", {"seed": 1})
    assert session.host.pid is not None
    os.kill(session.host.pid, signal.SIGKILL)
    while session.host.alive:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    other, opening = await game.begin("u", {"seed": 1})
    assert opening.messages
    assert other.host is not session.host
    await game.close()


@pytest.mark.parametrize("cancelled", [True, False])
async def test_an_environment_that_does_not_begin_leaves_no_process(cancelled: bool) -> None:
    game = TextGame(environment=f"{GAMES}:Sleepy", begin_seconds=30 if cancelled else 0.2)
    await game.start()
    beginning = asyncio.create_task(game.begin("t", {"seed": 1}))
    if cancelled:
        await asyncio.sleep(0.2)
        beginning.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else ToolFault):
        await beginning
    assert game._host is not None
    children = psutil.Process(game._host.pid).children
    while children():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await game.close()


@pytest.mark.parametrize(
    ("extract", "turn", "answer"),
    [
        ("", "3", "3 is"),
        ("", "<think>99?</think>\n3", "3 is"),
        ("boxed", r"<think>\boxed{99}</think>\boxed{3} <think>\boxed{98}", "3 is"),
        ("boxed", r"It is \boxed{99}, no: \boxed{3}.", "3 is"),
        ("guess", "Hm.\n<guess>\n3</guess>", "3 is"),
        (r"\[(\d+)\]", "[99] or [3]", "3 is"),
        ("boxed", "3", r"No action was found; write it in \boxed{}."),
        ("guess", "3", "write it between <guess> and </guess>"),
    ],
)
async def test_the_action_is_taken_out_of_the_turn(extract: str, turn: str, answer: str) -> None:
    game = ToolSet([TextGame(environment=GUESS, extract=extract)])
    await game.start()
    opening_of(await begin(game, "t", seed=1, make={"below": 3}))
    assert answer in (await act(game, "t", 1, turn)).observation
    await game.close(grace_seconds=1.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"environment": GUESS, "python": "/no/python"}, "no such program"),
        ({"environment": GUESS, "extract": "(("}, "no regular expression"),
        ({"environment": GUESS, "max_steps": 0}, "max_steps"),
    ],
)
async def test_wrong_options_are_errors(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TextGame(**options)


async def test_needs_are_checked_before_a_training() -> None:
    await TextGame(environment=GUESS).check_needs()
    with pytest.raises(ConfigError, match="environment is empty"):
        await TextGame().check_needs()
    with pytest.raises(HostError, match="no function or class Nothing"):
        await TextGame(environment=f"{GAMES}:Nothing").check_needs()


async def test_rows_are_split_by_seed(tools: ToolSet) -> None:
    rows = list(read_rows(GUESS, count=10, first_seed=100, held_out=0.2, make={"below": 4}, max_turns=3))
    arguments = [row["extra_info"]["tools_kwargs"]["environment"] for row in rows]
    seeds = {
        s: [a["seed"] for a, r in zip(arguments, rows, strict=True) if r["extra_info"]["split"] == s]
        for s in ("train", "test")
    }
    assert seeds == {"train": list(range(100, 108)), "test": [108, 109]}
    assert {row["max_turns"] for row in rows} == {3}
    assert all(row["reward_model"]["ground_truth"] == "{}" for row in rows)  # a training refuses rows without
    result = await begin(tools, "row", **arguments[0])
    assert opening_of(result).messages[0]["content"].endswith("below 4.")
    await finish(tools, "row")
    assert "max_turns" not in next(iter(read_rows(GUESS, count=1)))
    with pytest.raises(ConfigError, match="share"):
        list(read_rows(GUESS, held_out=2))
