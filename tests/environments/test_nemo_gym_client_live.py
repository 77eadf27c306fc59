"""A client of NeMo-Gym's resources servers, against servers of nemo-gym itself, in an environment of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from environment_play import play_turns
from live_server import LiveServers
from peer_programs import peer_python, running_program

from tests.environments.test_nemo_gym_client import ADD_AND_READ, BLACKJACK, COUNTER, restart_and_check
from verl_tool.agent_loop.trajectory import StopReason
from verl_tool.client import ToolClient
from verl_tool.environments.nemo_gym import NemoGymEnvironment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SERVER = Path(__file__).with_name("nemo_gym_server.py")
COUNTER_SERVER = ("example_session_state_mgmt", "StatefulCounterResourcesServer")


def running(package: str, name: str) -> Any:
    return running_program(peer_python("nemo_gym"), SERVER, package, name)


async def test_a_row_is_solved_through_the_tool_server(servers: LiveServers) -> None:
    async with running(*COUNTER_SERVER) as peer:
        live = await servers.start([NemoGymEnvironment(url=peer.url)])
        async with ToolClient(live.observations_url) as client:
            described = await client.tools()
            for number, (turns, score) in enumerate([(ADD_AND_READ, 1.0), (ADD_AND_READ[1:], 0.0)]):
                played = await play_turns(
                    client, described, turns, {"row": COUNTER["row"]}, question="?", trajectory_id=f"t{number}"
                )
                assert played.stop is StopReason.ANSWERED
                assert played.verdict is not None
                assert played.verdict.score == score
        await restart_and_check(peer, "increment_counter")


async def test_a_game_of_the_gymnasium_kind(servers: LiveServers) -> None:
    async with running("blackjack", "BlackjackEnv") as peer:
        live = await servers.start([NemoGymEnvironment(url=peer.url)])
        async with ToolClient(live.observations_url) as client:
            turns = ["<action>hit</action>"] * 12
            played = await play_turns(client, await client.tools(), turns, {"row": BLACKJACK["row"]}, max_turns=14)
        assert played.stop is StopReason.TOOL_DONE
        assert played.verdict is not None
        assert played.verdict.score == -1.0
