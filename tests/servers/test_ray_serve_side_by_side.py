"""Servers that start at the same moment on one machine, each on a local Ray cluster of its own, share nothing."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from serve_harness import DATA
from server_command import Server

from verl_tool.client import ToolClient
from verl_tool.protocol import REPLICA_HEADER, SERVER_HEADER

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(600)]

TOOLS = ("calculator", "finish", "ray_echo")
KEY = "a key of the second server's"
SUMS = {"trajectory_ids": ["a"], "actions": ["<calculator>6*7</calculator>"]}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Three, of which the second wants a key."""
    keys = ({}, {"VERL_TOOL_API_KEY": KEY}, {})
    folders = [tmp_path_factory.mktemp(tool) for tool in TOOLS]
    given = (*TOOLS[:2], str(DATA / f"{TOOLS[2]}.py"))
    started = [Server(folder, "--tool_type", t, **key) for folder, t, key in zip(folders, given, keys, strict=True)]
    try:
        for server in started:
            server.wait_until_ready()
        yield started
    finally:
        for server in started:
            server.end()


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if data is None else "POST", path, data, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def health(server: Server) -> dict[str, Any]:
    return json.loads(ask(server.port, "/health")[2])


def replica_processes(server: Server) -> list[psutil.Process]:
    return [process for process in server.family() if "ServeReplica" in "".join(process.cmdline())]


def listened_on(server: Server) -> set[int]:
    """Ports on which processes of this server listen."""
    family = {process.pid for process in server.family()}
    connections = psutil.net_connections("tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN and c.pid in family}


def eventually(condition: Any, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def test_each_answers_for_itself_under_a_name_of_its_own(servers):
    reports = [health(server) for server in servers]
    assert [report["tools"] for report in reports] == [[tool] for tool in TOOLS]
    assert len({report["server"] for report in reports}) == 3
    listed = json.loads(ask(servers[0].port, "/replicas")[2])
    assert listed["server"] == reports[0]["server"]
    assert ask(servers[0].port, "/health")[1][SERVER_HEADER] == reports[0]["server"]


def test_no_port_is_listened_on_by_two(servers):
    ports = [listened_on(server) for server in servers]
    assert all(server.port in own for server, own in zip(servers, ports, strict=True))
    assert ports[0] & ports[1] == ports[0] & ports[2] == ports[1] & ports[2] == set()
    # Serve's own choice, the same in every cluster.
    assert not {8500, 9500, 30000} & set.union(*ports)


def test_what_is_meant_for_another_is_refused(servers):
    first, third = servers[0], servers[2]
    name, other = health(first)["server"], health(third)["server"]
    assert ask(first.port, "/get_observation", SUMS, **{SERVER_HEADER: name})[0] == 200
    status, _, body = ask(first.port, "/get_observation", SUMS, **{SERVER_HEADER: other})
    assert (status, json.loads(body)["error"]["type"]) == (421, "misdirected")
    assert ask(first.port, "/get_observation", SUMS, **{REPLICA_HEADER: "gone"})[0] == 421


async def test_key_goes_to_its_own_server_only(servers):
    server = servers[1]
    async with ToolClient(server.url, api_key=KEY) as client:
        result = await client.call("t", "<finish>done</finish>")
    assert result.fault is None
    [replica] = json.loads(ask(server.port, "/replicas", authorization=f"Bearer {KEY}")[2])["replicas"]
    assert ask(int(replica["url"].rpartition(":")[2]), "/tools")[0] == 401


def test_without_a_replica_nobody_answers_at_its_port_until_one_is_back(servers):
    server = servers[0]
    name = health(server)["server"]
    for process in replica_processes(server):
        process.kill()
    seen: set[str | None] = set()

    def is_back() -> bool:
        try:
            status, headers, _ = ask(server.port, "/get_observation", SUMS)
        except (ConnectionRefusedError, ConnectionResetError, http.client.RemoteDisconnected):
            seen.add(None)
            return False
        seen.add(headers[SERVER_HEADER])
        return status == 200

    eventually(lambda: not is_back(), 20.0)
    # The server keeps its port all the while.
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", server.port))
    eventually(is_back)
    assert seen == {None, name}
