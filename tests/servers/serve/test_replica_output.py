"""What of a cluster's output a server shows."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from verl_tool.servers.serve.replica_output import ReplicaOutput


def batch(actor: str | None, *lines: str, ip: str = "1.2.3.4", pid: int | str = 7) -> dict[str, object]:
    """As Ray's log monitor sends it."""
    return {"actor_name": actor, "lines": list(lines), "ip": ip, "pid": pid, "localhost": "1.2.3.4", "is_err": True}


@pytest.mark.parametrize("local", [True, False])
def test_a_server_shows_what_its_own_replicas_say(local):
    output = ReplicaOutput("mine", local=local)
    assert output.lines(batch("ServeReplica:mine:tools", "a", "b")) == ["(replica 7) a", "(replica 7) b"]
    assert output.lines(batch("ServeReplica:mine:tools", "a", ip="5.6.7.8")) == ["(replica 7, node 5.6.7.8) a"]
    assert not output.lines(batch("ServeController", "INFO nothing new"))


@pytest.mark.parametrize("actor", ["ServeReplica:others:tools", "ServeReplica:mine2:tools", "ServeController", None])
def test_on_a_shared_cluster_it_shows_nothing_of_others(actor):
    assert not ReplicaOutput("mine", local=False).lines(batch(actor, "ERROR of somebody else"))


def test_on_its_own_cluster_it_shows_warnings_of_ray_and_serve():
    output = ReplicaOutput("mine", local=True)
    assert output.lines(batch("ServeController", "WARNING a replica died")) == [
        "(ServeController) WARNING a replica died"
    ]
    assert output.lines(batch(None, "Error: out of memory", pid="raylet")) == ["(raylet) Error: out of memory"]
