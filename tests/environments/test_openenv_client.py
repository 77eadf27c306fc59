"""A client of OpenEnv servers, against one that answers as openenv 0.10 did (``data/openenv.json``)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from environment_play import hermes, play_turns
from live_server import LiveServers
from replayed_environments import ReplayedOpenEnv, serve_app
from toy_model import ToyTokenizer

from verl_tool.agent_loop.trajectory import Excluded, StopReason, Trajectory
from verl_tool.client import ToolClient
from verl_tool.environments.openenv import OpenEnvEnvironment, describe_observation, read_action_form, read_rows
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.formats import Call
from verl_tool.formats.direct import DIRECT
from verl_tool.protocol import FaultKind
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tools.base import ToolResult

RECORDED = json.loads((Path(__file__).parent / "data" / "openenv.json").read_text())


@asynccontextmanager
async def client_of(server: ReplayedOpenEnv, **options: Any) -> AsyncIterator[OpenEnvEnvironment]:
    async with serve_app(server.app) as url:
        environment = OpenEnvEnvironment(url=url, **options)
        try:
            yield environment
        finally:
            await environment.close()


async def play(server: ReplayedOpenEnv, turns: Sequence[str], arguments: Any = None, **options: Any) -> Trajectory:
    async with client_of(server, **options) as environment, InProcessTools([environment]) as served:
        return await play_turns(served, served.describe(), turns, arguments or {}, max_turns=8)


def act(text: str) -> Call:
    return Call("openenv", text, 0, len(text), DIRECT)


def prompt_of(trajectory: Trajectory) -> str:
    return ToyTokenizer().decode(trajectory.prompt_ids)


async def test_each_turn_is_the_text_of_an_action_with_one_field() -> None:
    server = ReplayedOpenEnv(RECORDED["guess"])
    turns = ["<think>half</think> 8 ", "crash", "x", "4"]
    trajectory = await play(server, turns, {"seed": 3})
    assert "user\nGuess a number from 1 to 8." in prompt_of(trajectory)
    assert [(call.observation, call.valid) for call in trajectory.turn_calls] == [
        ("lower", True),
        ("boom", True),
        ("no number", True),
        ("right", True),
    ]
    assert trajectory.stop is StopReason.TOOL_DONE
    assert trajectory.verdict is not None
    assert trajectory.verdict.score == pytest.approx(0.9)
    assert "<|im_start|>user\nlower<|im_end|>" in ToyTokenizer().decode(trajectory.response_ids)
    [received] = server.received
    assert received[:2] == [{"type": "reset", "data": {"seed": 3}}, {"type": "step", "data": {"guess": "8"}}]
    assert server.open == 0


async def test_several_fields_are_the_arguments_of_a_tool() -> None:
    turns = [hermes("act", '{"steps": 5}'), hermes("act", '{"steps": "far"}'), hermes("act", '{"steps":2,"back":true}')]
    trajectory = await play(ReplayedOpenEnv(RECORDED["walk"]), turns)
    assert "Moves on a line." in prompt_of(trajectory)
    assert "Reach 3." in prompt_of(trajectory)
    first, wrong, last = trajectory.turn_calls
    assert "You are at 5." in first.observation
    assert not wrong.valid
    assert "steps: Input should be a valid integer" in wrong.observation
    assert last.reward == 1.0
    assert trajectory.stop is StopReason.TOOL_DONE


async def test_tools_are_listed_after_the_reset_and_called() -> None:
    turns = [
        hermes("add", '{"a": 3, "b": 4}'),
        hermes("crash"),
        hermes("add", '{"a": "x"}'),
        hermes("nope"),
        "7",
    ]
    trajectory = await play(ReplayedOpenEnv(RECORDED["add"]), turns)
    assert "Sum of two numbers." in prompt_of(trajectory)
    assert "What is 3+4?" in prompt_of(trajectory)
    added, crashed, wrong, unknown = trajectory.turn_calls
    assert "\n7\n" in added.observation
    assert (crashed.valid, wrong.valid, unknown.valid) == (True, False, False)
    assert "boom" in crashed.observation
    assert crashed.metrics is not None
    assert crashed.metrics["error"] == 1.0
    assert trajectory.stop is StopReason.ANSWERED
    assert trajectory.verdict is not None
    assert trajectory.verdict.score == 0.0


async def test_the_action_may_be_between_tags() -> None:
    async with client_of(ReplayedOpenEnv(RECORDED["guess"]), action_tag="action") as environment:
        session, opening = await environment.begin("t", {"seed": 3})
        assert opening.every_turn
        missing = await environment.step(session, act("I say 4"))
        assert (missing.valid, missing.role) == (False, "user")
        right = await environment.step(session, act("<action>1</action>, no: <action> 4 </action>."))
        assert (right.text, right.done) == ("right", True)
        await environment.end(session)


async def test_a_model_may_write_for_longer_than_the_server_waits_for_pings() -> None:
    server = ReplayedOpenEnv(RECORDED["guess"])
    server.ping_seconds = 0.8
    async with client_of(server) as environment:
        session, _ = await environment.begin("t", {"seed": 3})
        await asyncio.sleep(2.0)
        assert (await environment.step(session, act("8"))).text == "lower"
        await environment.end(session)


async def test_a_full_server_is_tried_again() -> None:
    server = ReplayedOpenEnv(RECORDED["guess"], max_sessions=1)
    async with client_of(server) as environment:
        session, _ = await environment.begin("t", {"seed": 3})
        with pytest.raises(ToolFault, match="CAPACITY_REACHED") as full:
            await environment.begin("u", {"seed": 3})
        assert (full.value.kind, full.value.retryable) == (FaultKind.OVERLOADED, True)
        await environment.end(session)
        session, _ = await environment.begin("u", {"seed": 3})
        await environment.end(session)


async def fault_of(server: ReplayedOpenEnv, **options: Any) -> ToolFault:
    """The fault of a step whose answer is not recorded."""
    async with client_of(server, **options) as environment:
        session, _ = await environment.begin("t", {"seed": 3})
        with pytest.raises(ToolFault) as raised:
            await environment.step(session, act("1"))
        with pytest.raises(ToolFault):
            await environment.step(session, act("1"))
        await environment.end(session)
    return raised.value


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (1001, FaultKind.STATE_LOST, "code 1001"),
        (None, FaultKind.TIMEOUT, "no answer to step within 0.5 s"),
        (
            json.dumps({"type": "observation", "data": {"text": "x" * 2000}}),
            FaultKind.TOOL_CRASHED,
            "max_message_bytes",
        ),
        ("[]", FaultKind.MISCONFIGURED, "no answer of an OpenEnv environment"),
        ('{"type": "state", "data": {}}', FaultKind.MISCONFIGURED, "'state'"),
        ('{"type": "error", "data": {"code": "SESSION_ERROR", "message": "?"}}', FaultKind.MISCONFIGURED, "SESSION"),
    ],
)
async def test_what_no_action_should_cause_is_a_fault(answer: Any, kind: FaultKind, words: str) -> None:
    server = ReplayedOpenEnv(RECORDED["guess"])
    server.answers["1"] = answer
    fault = await fault_of(server, max_message_bytes=1024, step_seconds=0.5)
    assert fault.kind is kind
    assert words in fault.message
    assert not fault.retryable


async def test_a_lost_connection_leaves_the_trajectory_out() -> None:
    server = ReplayedOpenEnv(RECORDED["guess"])
    server.answers["1"] = 1012
    trajectory = await play(server, ["8", "1"], {"seed": 3})
    assert trajectory.fault is not None
    assert trajectory.fault.kind is FaultKind.STATE_LOST
    assert trajectory.excluded is Excluded.FAULT


async def test_an_answer_that_nothing_was_sent_for_is_no_answer_to_the_next_action() -> None:
    server = ReplayedOpenEnv(RECORDED["guess"])
    async with client_of(server) as environment:
        session, _ = await environment.begin("t", {"seed": 3})
        await server.sockets[0].send_json(
            {"type": "observation", "data": {"observation": {"text": "won"}, "done": True}}
        )
        await asyncio.sleep(0.1)
        with pytest.raises(ToolFault, match="nothing was sent for"):
            await environment.step(session, act("8"))
        await environment.end(session)


async def test_a_server_that_is_not_there_or_wants_a_key() -> None:
    server = ReplayedOpenEnv(RECORDED["guess"], api_key="open sesame")
    async with client_of(server) as environment:
        with pytest.raises(ToolFault, match=r"HTTP 401; set the options url and api_key") as refused:
            await environment.begin("t", {})
        assert refused.value.kind is FaultKind.MISCONFIGURED
        environment._form = read_action_form(RECORDED["guess"]["schema"]["action"])
        with pytest.raises(ToolFault, match=r"/ws answered HTTP 401"):
            await environment.begin("t", {})
    async with client_of(server, api_key="open sesame") as environment:
        session, _ = await environment.begin("t", {"seed": 3})
        await environment.end(session)
    with pytest.raises(ToolFault, match="is the server running") as absent:
        await environment.check_needs()
    assert (absent.value.kind, absent.value.retryable) == (FaultKind.UNREACHABLE, True)


async def test_no_proxy_of_the_machine_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with client_of(ReplayedOpenEnv(RECORDED["guess"])) as environment:
        await environment.check_needs()
        rows = await asyncio.to_thread(lambda: list(read_rows(environment.options.url, count=1)))
        assert len(rows) == 1


async def test_rows_are_seeds_of_a_server() -> None:
    async with serve_app(ReplayedOpenEnv(RECORDED["guess"]).app) as url:
        rows = await asyncio.to_thread(lambda: list(read_rows(url, count=2, first_seed=3, level="hard")))
    assert [row["extra_info"]["tools_kwargs"]["environment"] for row in rows] == [
        {"name": "openenv", "seed": seed, "level": "hard"} for seed in (3, 4)
    ]
    assert rows[0]["prompt"] == [{"role": "system", "content": "Guessing environment"}]
    assert rows[0]["reward_model"]["style"] == "environment"
    with pytest.raises(ConfigError, match="start the server"):
        list(read_rows(url))


async def test_the_loop_plays_through_the_tool_server(servers: LiveServers) -> None:
    server = ReplayedOpenEnv(RECORDED["guess"])
    async with client_of(server) as environment:
        live = await servers.start([environment])
        async with ToolClient(live.observations_url) as client:
            trajectory = await play_turns(client, await client.tools(), ["8", "4"], {"seed": 3}, max_turns=8)
    assert [call.observation for call in trajectory.turn_calls] == ["lower", "right"]
    assert trajectory.verdict is not None
    assert trajectory.verdict.score == 1.0
    assert server.open == 0


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"text": "hi", "metadata": {}}, "hi"),
        ({"text": "hi", "board": [1], "metadata": {"a": 1}}, '{"text":"hi","board":[1]}'),
        ({"metadata": {"task": "Add."}}, "Add."),
        ({"metadata": {}}, ""),
        ({"n": 0}, "0"),
        ("bare", "bare"),
        (None, ""),
    ],
)
def test_an_observation_is_its_only_text_or_json(observation: Any, text: str) -> None:
    assert describe_observation(observation) == text


def test_the_schema_says_what_an_action_is() -> None:
    optional = {"properties": {"text": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "metadata": {}}}
    assert read_action_form(optional).field == "text"
    number = read_action_form({"properties": {"n": {"type": "integer"}}, "required": ["n"]})
    assert number.tool is not None
    assert number.tool.parameters["required"] == ["n"]
    two = {"properties": {"say": {"type": "string"}, "to": {"type": "string"}}}
    assert read_action_form(two).field is None
    assert read_action_form(two, "say").field == "say"
    with pytest.raises(ToolFault, match="say, to"):
        read_action_form(two, "shout")


def test_bad_options_are_named() -> None:
    with pytest.raises(ConfigError, match="give an address"):
        OpenEnvEnvironment(url="ws://x")
    with pytest.raises(ConfigError, match="action_tag"):
        OpenEnvEnvironment(url="http://x", action_tag="<a>")


async def test_the_result_is_a_tools_result() -> None:
    """Numbers, and booleans, are rewards; None is none."""
    async with client_of(ReplayedOpenEnv(RECORDED["guess"])) as environment:
        session, _ = await environment.begin("t", {"seed": 3})
        result = await environment.step(session, act("x"))
        assert result == ToolResult("no number", reward=-0.1, role="user")
        await environment.end(session)
