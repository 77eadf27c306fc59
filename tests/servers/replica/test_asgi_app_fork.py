"""POST /fork over real HTTP: what is answered, with which status."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from live_server import LiveServer, LiveServers
from toy_tools import Ledger, Puppet, text

from verl_tool.servers.replica.router import FORWARDED_HEADER
from verl_tool.servers.tools.base import Tool


class Stuck(Ledger):
    name = "stuck"
    example_actions = ("<stuck>x</stuck>",)
    fork_state = Tool.fork_state


async def post(server: LiveServer, path: str, body: object, **headers: str) -> tuple[int, Any]:
    data = json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, data=data, headers=headers) as response,
    ):
        return response.status, json.loads(await response.read())


async def step(server: LiveServer, trajectory: str, action: str, number: int) -> str:
    body = {"trajectory_ids": [trajectory], "actions": [action], "steps": [number]}
    status, answer = await post(server, "/get_observation", body)
    assert status == 200, answer
    return text(answer["observations"][0])


def pair(source: str, new: str) -> dict[str, str]:
    return {"trajectory_id": source, "new_trajectory_id": new}


async def test_a_fork_and_what_is_refused(servers: LiveServers) -> None:
    server = await servers.start([Ledger(), Stuck()])
    await step(server, "a", "<ledger>x</ledger>", 0)
    status, answer = await post(server, "/fork", pair("a", "b"))
    assert (status, answer) == (200, {"trajectory_id": "b", "replica": "local", "fault": None})
    assert await step(server, "b", "<ledger>y</ledger>", 1) == "x,y"
    assert await step(server, "a", "<ledger>z</ledger>", 1) == "x,z"

    await step(server, "s", "<stuck>x</stuck>", 0)
    for body, expected, kind in (
        (pair("s", "t"), 409, "not_forkable"),
        (pair("nobody", "t"), 404, "state_lost"),
        (pair("a", "b"), 400, "bad_request"),
    ):
        status, answer = await post(server, "/fork", body)
        assert (status, answer["error"]["type"], answer["fault"]["kind"]) == (expected, kind, kind)
        assert answer["error"]["message"] == answer["fault"]["message"]
    assert set(server.app.toolset.trajectories()) == {"a", "b", "s"}
    assert server.app.admission.inside == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"trajectory_id": "a"}, "new_trajectory_id"),
        (pair("a", ""), "new_trajectory_id"),
        (pair("a\n", "b"), "trajectory_id"),
        (pair("a", "b" * 300), "new_trajectory_id"),
        ({**pair("a", "b"), "step": 1}, "step"),
        ({"trajectory_id": 7, "new_trajectory_id": "b"}, "trajectory_id"),
    ],
)
async def test_a_wrong_body_is_refused_by_its_field(servers: LiveServers, body: dict[str, object], field: str) -> None:
    status, answer = await post(await servers.start([Ledger()]), "/fork", body)
    assert (status, answer["error"]["type"], answer["error"]["field"]) == (400, "bad_request", field)


async def test_it_asks_for_the_key_and_takes_nobodys_word_for_a_forwarded_request(servers: LiveServers) -> None:
    server = await servers.start([Ledger()], api_key="secret")
    for key, expected in (("", 401), ("Bearer wrong", 401), ("Bearer secret", 404)):
        status, _ = await post(server, "/fork", pair("a", "b"), authorization=key)
        assert status == expected
    headers = {"authorization": "Bearer secret", FORWARDED_HEADER: "1"}
    assert (await post(server, "/fork", pair("a", "b"), **headers))[0] == 403


async def test_it_is_refused_when_the_queue_is_full(servers: LiveServers) -> None:
    server = await servers.start([Puppet()], max_concurrent_requests=1, max_queued=0)
    assert server.app.admission.admit(1)
    status, answer = await post(server, "/fork", pair("a", "b"))
    assert (status, answer["error"]["type"]) == (503, "overloaded")
    server.app.admission.release(1)
