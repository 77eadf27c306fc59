"""A client of OpenEnv servers, against openenv's own, in an environment of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from environment_play import hermes, play_turns
from live_server import LiveServers
from peer_programs import peer_python, running_program

from verl_tool.agent_loop.trajectory import Excluded, StopReason
from verl_tool.client import ToolClient
from verl_tool.environments.openenv import OpenEnvEnvironment
from verl_tool.errors import ToolFault
from verl_tool.formats import Call
from verl_tool.formats.direct import DIRECT
from verl_tool.protocol import FaultKind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERVER = Path(__file__).with_name("openenv_server.py")
MAX_SESSIONS = 64


def act(text: str) -> Call:
    return Call("openenv", text, 0, len(text), DIRECT)


async def test_a_game_is_played_through_the_tool_server(servers: LiveServers) -> None:
    async with running_program(peer_python("openenv"), SERVER, "guess") as peer:
        live = await servers.start([OpenEnvEnvironment(url=peer.url)])
        async with ToolClient(live.observations_url) as client:
            described = await client.tools()
            turns = ["8", "crash", "x", "4"]
            played = await play_turns(client, described, turns, {"seed": 3}, max_turns=8)
            assert [call.observation for call in played.turn_calls] == ["lower", "boom", "no number", "right"]
            assert played.stop is StopReason.TOOL_DONE
            assert played.verdict is not None
            assert played.verdict.score == pytest.approx(0.9)
            lost = await play_turns(client, described, ["8", "exit"], {"seed": 3}, trajectory_id="u", max_turns=8)
            assert lost.fault is not None
            assert lost.fault.kind is FaultKind.STATE_LOST
            assert lost.excluded is Excluded.FAULT


async def test_tools_are_called_through_the_tool_server(servers: LiveServers) -> None:
    async with running_program(peer_python("openenv"), SERVER, "add") as peer:
        live = await servers.start([OpenEnvEnvironment(url=peer.url)])
        turns = [hermes("add", '{"a": 3, "b": 4}'), hermes("add", '{"a": "x"}'), hermes("crash"), "7"]
        async with ToolClient(live.observations_url) as client:
            played = await play_turns(client, await client.tools(), turns, {}, max_turns=8)
        added, wrong, crashed = played.turn_calls
        assert "\n7\n" in added.observation
        assert (wrong.valid, crashed.valid) == (False, True)
        assert "boom" in crashed.observation


async def test_several_fields_are_a_tool() -> None:
    async with running_program(peer_python("openenv"), SERVER, "walk") as peer:
        environment = OpenEnvEnvironment(url=peer.url)
        session, opening = await environment.begin("t", {})
        assert [tool.name for tool in opening.tools] == ["act"]
        call = Call("act", "", 0, 0, DIRECT, {"steps": 3})
        result = await environment.step(session, call)
        assert (result.text, result.reward, result.done) == ("You are at 3.", 1.0, True)
        await environment.end(session)
        await environment.close()


async def test_sessions_outlive_pings_and_end_at_limits() -> None:
    """The server pings each second and waits a second for the answer."""
    async with running_program(peer_python("openenv"), SERVER, "guess") as peer:
        environment = OpenEnvEnvironment(url=peer.url, max_message_bytes=4096)
        opened = await asyncio.gather(*(environment.begin(f"t{i}", {"seed": i}) for i in range(MAX_SESSIONS)))
        with pytest.raises(ToolFault, match="CAPACITY_REACHED") as full:
            await environment.begin("one more", {})
        assert full.value.retryable
        await asyncio.sleep(4)
        results = await asyncio.gather(*(environment.step(session, act("9")) for session, _ in opened))
        assert {result.text for result in results} == {"lower"}
        with pytest.raises(ToolFault, match="max_message_bytes") as long:
            await environment.step(opened[0][0], act("long5000"))
        assert long.value.kind is FaultKind.TOOL_CRASHED
        await asyncio.gather(*(environment.end(session) for session, _ in opened))
        session, _ = await environment.begin("now", {})
        await peer.kill()
        with pytest.raises(ToolFault, match="code 1006") as lost:
            await environment.step(session, act("1"))
        assert lost.value.kind is FaultKind.STATE_LOST
        await environment.end(session)
        await environment.close()
