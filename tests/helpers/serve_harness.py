"""Helpers for tests of a live Ray Serve: a server in its own cluster, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from verl_tool.servers.serve.ports import free_ports
from verl_tool.servers.serve.serve_cluster import ServeCluster
from verl_tool.servers.settings import AutoscalingSettings, ReplicaSettings, new_server_name

DATA = Path(__file__).parents[1] / "servers" / "data"
APP = "verl_tool"
OBSERVED = re.compile(r"(\S+)@(\d+)")


class LiveServer:
    """A `ServeCluster` and its application, which tests deploy again with other settings."""

    def __init__(self, cluster: ServeCluster) -> None:
        self.cluster = cluster
        self.url = cluster.url
        self._server = new_server_name(APP)
        self._deployed: tuple[ReplicaSettings, int | AutoscalingSettings] | None = None

    def deploy(self, tool: str, replicas: int | AutoscalingSettings, **settings: Any) -> None:
        """Deploy a tool of tests/servers/data, and return once exactly so many replicas serve it.

        A deployed tool is left as it is. Only a killed replica is waited for.
        """
        wanted = (self.settings(tool, **settings), replicas)
        if wanted != self._deployed:
            self._deployed = wanted
            self.cluster.deploy(*wanted, cpus_per_replica=0.1)
        count = replicas if isinstance(replicas, int) else replicas.min_replicas
        self.wait_for(lambda: len(self.replica_ids()) == count, f"{count} replicas")

    def settings(self, tool: str, **settings: Any) -> ReplicaSettings:
        """Return settings with short waits."""
        defaults = {"app_name": APP, "tool_type": str(DATA / tool), "drain_seconds": 30.0, "server": self._server}
        return ReplicaSettings(**{**defaults, **settings})

    def replicas(self, api_key: str = "") -> list[dict[str, Any]]:
        """Return the replicas that clients may call directly: those that accept new trajectories."""
        status, answer = self.get("/replicas", api_key)
        return answer["replicas"] if status == 200 else []

    def replica_ids(self) -> set[str]:
        """Return the ids of `replicas`."""
        return {replica["id"] for replica in self.replicas()}

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        """Wait until `condition` holds, and fail after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
            time.sleep(0.3)

    def get(self, path: str, api_key: str = "") -> tuple[int, Any]:
        """Return status and JSON of one GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.cluster.port, timeout=30)
        try:
            connection.request("GET", path, headers={"authorization": f"Bearer {api_key}"})
            response = connection.getresponse()
            body = response.read()
            return response.status, json.loads(body) if response.status == 200 else None
        finally:
            connection.close()


def new_cluster(**options: Any) -> ServeCluster:
    """Start a cluster of its own on a free port, with resources for what the tests deploy."""
    return ServeCluster(
        **{
            "host": "127.0.0.1",
            "port": free_ports(1)[0],
            "logical_cpus": 8,
            **options,
        }
    )


async def post(
    session: aiohttp.ClientSession,
    url: str,
    ids: Sequence[str],
    action: str,
    **columns: Any,
) -> tuple[int, dict[str, Any]]:
    """Send one plain request with the same action for all `ids`. `columns` are further lists."""
    body = {"trajectory_ids": list(ids), "actions": [action] * len(ids), **columns}
    async with session.post(f"{url}/get_observation", json=body) as response:
        text = await response.read()
        return response.status, (await response.json() if text.startswith(b"{") else {})


async def finish(session: aiohttp.ClientSession, url: str, ids: Sequence[str]) -> None:
    """Free the trajectories."""
    for start in range(0, len(ids), 500):
        part = ids[start : start + 500]
        status, _ = await post(session, url, part, "", finish=[True] * len(part))
        assert status == 200


def observed(text: str) -> tuple[str, int]:
    """Return a test tool's output and the pid of the replica that ran it."""
    found = OBSERVED.search(text)
    assert found is not None, f"no observation of a test tool: {text!r}"
    return found[1], int(found[2])


def kill(pid: int) -> None:
    """Kill it as a crash would."""
    os.kill(pid, signal.SIGKILL)
