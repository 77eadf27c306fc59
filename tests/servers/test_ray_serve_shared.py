"""Servers on a Ray cluster that serves somebody else's application already, and each other's; Serve's own commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
import yaml
from ray.cluster_utils import Cluster
from serve_harness import DATA
from server_command import COMMAND, STOP_SECONDS, Server
from test_ray_serve_side_by_side import ask, eventually

from verl_tool.client import ToolClient
from verl_tool.protocol import StepRequest
from verl_tool.servers.serve import launcher
from verl_tool.servers.serve.launcher import NAMESPACE
from verl_tool.servers.serve.ports import free_ports

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(400)]

OTHERS = """
import sys
import ray
from ray import serve

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
def hello(request) -> str:
    return "hello"

ray.init(address=sys.argv[1], logging_level="WARNING", log_to_driver=False)
serve.start(http_options={"port": int(sys.argv[2])})
serve.run(hello.bind(), name="others", route_prefix="/others")
"""


@pytest.fixture(scope="module")
def busy() -> Iterator[tuple[str, int]]:
    """Address of a cluster with an application of somebody else's, and the port of its ingress."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        (port,) = free_ports(1)
        subprocess.run([sys.executable, "-c", OTHERS, cluster.address, str(port)], check=True, timeout=120)
        yield cluster.address, port
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def start(busy, tmp_path: Path) -> Iterator[object]:
    started: list[Server] = []

    def start_one(name: str, tool: str, *options: str) -> Server:
        folder = tmp_path / f"{name}-{len(started)}"
        folder.mkdir()
        url_file = folder / "url"
        arguments = ("--ray_address", busy[0], "--app_name", name, "--tool_type", tool, "--url_file", str(url_file))
        started.append(Server(folder, "--cpus_per_replica", "0.1", *arguments, *options))
        return started[-1]

    yield start_one
    for server in started:
        server.end()


def calculates(port: int) -> bool:
    body = {"trajectory_ids": ["a"], "actions": ["<calculator>6*7</calculator>"]}
    status, _, answer = ask(port, "/get_observation", body)
    return status == 200 and b"42" in answer


def refusal(address: str, name: str) -> str:
    """What the command prints that cannot serve under `name`."""
    options = ("--ray_address", address, "--app_name", name, "--tool_type", "finish", "--port", str(free_ports(1)[0]))
    run = subprocess.run(
        [*COMMAND, *options],
        capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stderr


def test_servers_join_a_serve_that_runs_and_leave_it_as_it_was(busy, start):
    address, port = busy
    first, second = start("first", "calculator"), start("second", "finish")
    printed = first.wait_until_ready() + second.wait_until_ready()
    assert f"serves at   {first.url}/get_observation" in printed
    assert f"serves at   {second.url}/get_observation" in printed
    assert calculates(first.port)
    assert not calculates(second.port)
    assert ask(port, "/others")[2] == b"hello"
    # Ray would print what all replicas on the cluster say.
    assert not re.search(r"\((ServeReplica|ServeController|ProxyActor|raylet)", printed)

    assert "serves on this cluster under the name 'first'; give another with --app_name" in refusal(address, "first")
    assert "is none of ours" in refusal(address, "others")

    # What a dead launcher left is replaced by the same command.
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait(STOP_SECONDS)
    again = start("first", "finish")
    again.wait_until_ready()
    assert b'"tools":["finish"]' in ask(again.port, "/health")[2]

    for server in (again, second):
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(STOP_SECONDS) == 0, server.output()
        with pytest.raises(ConnectionRefusedError):
            ask(server.port, "/health")
    assert ask(port, "/others")[2] == b"hello"


@pytest.fixture
def claim(busy) -> Iterator[Callable[[str], ray.ObjectRef[None]]]:
    """Claim a name in a process of its own, as another launcher does."""
    ray.init(address=busy[0], namespace=NAMESPACE, log_to_driver=False)
    try:
        yield ray.remote(num_cpus=0, max_retries=0)(launcher.claim_name).remote
    finally:
        ray.shutdown()


def test_who_stops_is_waited_for(claim):
    launcher.claim_name("mine")
    with pytest.raises(launcher.NameInUseError, match=r"process \d+ on .* serves on this cluster .* 'mine'"):
        ray.get(claim("mine"), timeout=60)
    launcher.announce_stop("mine")
    claimed = claim("mine")
    assert not ray.wait([claimed], timeout=launcher.SERVING_SECONDS + 2)[0]
    launcher.release_name("mine")
    ray.get(claimed, timeout=60)


@pytest.mark.e2e
def test_a_name_outlives_the_process_of_its_actor(claim):
    launcher.claim_name("lasting")
    with pytest.raises(launcher.NameInUseError):
        ray.get(claim("lasting"), timeout=60)
    actors = [process for process in psutil.process_iter() if "ray::Launcher" in " ".join(cmdline(process))]
    assert actors
    for process in actors:
        process.kill()
    with pytest.raises(launcher.NameInUseError):
        ray.get(claim("lasting"), timeout=60)
    launcher.release_name("lasting")
    ray.get(claim("lasting"), timeout=60)


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_tool_s_traceback_is_in_the_output_of_its_own_server_only(start):
    echo = str(DATA / "ray_echo.py")
    mine, other = start("mine", echo), start("other", echo)
    for server in (mine, other):
        server.wait_until_ready()
    body = {"trajectory_ids": ["the-one"], "actions": ["<ray_echo>a:soon</ray_echo>"]}
    assert b"tool_crashed" in ask(mine.port, "/get_observation", body)[2]
    eventually(lambda: "could not convert string to float: 'soon'" in mine.output())
    assert re.search(r"\(replica \d+\) .* \[trajectory the-one\]: tool ray_echo crashed", mine.output())
    assert "ray_echo crashed" not in other.output()


EXAMPLE = Path(__file__).parents[2] / "examples" / "serve" / "tool_server.yaml"


@pytest.fixture
def port_of_example(busy) -> int:
    """`serve deploy` and KubeRay hand the same file to the same call of Serve's, by way of the dashboard."""
    address, _ = busy
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(EXAMPLE), "--address", address, "--non-blocking"]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    port = yaml.safe_load(EXAMPLE.read_text())["applications"][0]["args"]["listen_port"]
    eventually(lambda: len(replicas(port)) == 2)
    return int(port)


async def test_serves_own_command_runs_the_example_file(busy, port_of_example):
    port = port_of_example
    async with ToolClient(f"http://127.0.0.1:{port}") as client:
        actions = ["<calculator>6*7</calculator>", "```python\nprint(6 * 7)\n```"] * 10
        results = await client.step([StepRequest(f"t{i}", action, 0) for i, action in enumerate(actions)])
        report = await client.health()
    assert ["42" in result.observation for result in results] == [True] * 20, results
    assert ask(busy[1], "/others")[2] == b"hello"

    # Both replicas ran some of it, and know each other by Serve's list.
    assert {report.replica, *(peer.replica for peer in report.replicas)} == {r["id"] for r in replicas(port)}
    assert report.server.startswith("verl_tool-")
    calls = re.findall(r'^verl_tool_calls_total{.*replica="([^"]+)"', ask(port, "/metrics")[2].decode(), re.MULTILINE)
    assert len(set(calls)) == 2
    titles = [" ".join(cmdline(process)) for process in psutil.Process().children(recursive=True)]
    assert any("ServeReplica" in title for title in titles)


def replicas(port: int) -> list[dict[str, str]]:
    """None as long as there is nobody to ask."""
    try:
        status, _, answer = ask(port, "/replicas")
    except ConnectionRefusedError:
        return []
    return json.loads(answer)["replicas"] if status == 200 else []
