"""What a replica prints and logs, and what of a cluster's output a server shows."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("ray")

from verl_tool.servers.serve.replica_log import ReplicaOutput

LOGS = """
import logging, sys
from verl_tool.servers.execution.current_trajectory import running_for
from verl_tool.servers.serve.replica_log import log_to_stderr

log_to_stderr("WARNING")
tool = logging.getLogger("own.tool")
with running_for("t-1"):
    print("half", end=" ")
    print("a line")
    sys.stderr.write("two\\nlines\\n")
    tool.info("unheard")
    try:
        raise KeyError("boom")
    except KeyError:
        tool.exception("it crashed")
print("of nobody")
"""


def test_what_is_printed_and_logged_tells_its_trajectory():
    done = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == ""
    lines = [line[24:] if line[:2] == "20" else line for line in done.stderr.splitlines()]
    assert [line for line in lines if line.startswith("INFO")] == [
        "INFO stdout [trajectory t-1]: half a line",
        "INFO stderr [trajectory t-1]: two",
        "INFO stderr [trajectory t-1]: lines",
        "INFO stdout: of nobody",
    ]
    assert "ERROR own.tool [trajectory t-1]: it crashed" in lines
    assert "KeyError: 'boom'" in lines
    assert "unheard" not in done.stderr


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
