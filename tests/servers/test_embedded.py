"""``ray_serve --embedded``: one process, which answers as a server on Ray does and leaves nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from serve_harness import DATA, observed, post
from server_command import STOP_SECONDS, Server, gone, run, start

from verl_tool.client import ToolClient
from verl_tool.protocol import StepRequest

pytestmark = pytest.mark.slow

COUNT = "<ray_counter>0</ray_counter>"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    for server in start(
        tmp_path, "--embedded", "--tool_type", f"python_code,calculator,{DATA / 'ray_counter.py'}", RAY_ADDRESS="auto"
    ):
        server.wait_until_ready()
        yield server


async def test_it_serves_in_one_process_and_a_sigint_leaves_no_process(server):
    assert "one process, without Ray" in server.output()
    async with ToolClient(server.url) as client:
        results = await client.step([StepRequest(name, COUNT, step) for step in (0, 1) for name in ("a", "b")])
        assert [observed(result.observation)[0] for result in results] == ["1", "1", "2", "2"]
        again = await client.call("a", COUNT, step=1)
        assert observed(again.observation)[0] == "2"
        printed = await client.call("c", "```python\nprint(6 * 7)\n```", step=0)
        assert "42" in printed.observation
        assert await client.finish(["a", "b", "c"])
    async with aiohttp.ClientSession() as session:
        status, answer = await post(session, server.url, ["d"], "<calculator>13.1-3</calculator>")
        assert (status, "10.1" in answer["observations"][0]) == (200, True)
        async with session.get(f"{server.url}/health") as health:
            assert (await health.json())["status"] == "healthy"

    family = server.family()
    assert not [process for process in family if "ray" in process.name()]
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=STOP_SECONDS) == 0
    assert gone(family, seconds=10) == []


async def test_it_goes_on_after_an_update_that_it_cannot_make_and_leaves_no_process_when_killed(server):
    server.process.send_signal(signal.SIGUSR1)
    async with ToolClient(server.url) as client:
        assert observed((await client.call("a", COUNT, step=0)).observation)[0] == "1"
    assert "stop it and start it again" in server.output()
    second = run("--embedded", "--port", str(server.port), "--tool_type", "calculator")
    assert second.returncode == 1
    assert f"port {server.port} belongs to another tool server" in second.stderr
    family = server.family()
    server.process.kill()
    server.process.wait(timeout=STOP_SECONDS)
    assert gone(family, seconds=10) == []


@pytest.mark.parametrize("option", ["--num_replicas=2", "--ray_address=auto", "--app_name=mine"])
def test_options_of_the_cluster_are_refused_beside_it(option):
    finished = run("--embedded", "--tool_type", "calculator", option)
    assert finished.returncode == 2
    assert f"--embedded is one process without Ray, and {option.split('=')[0]} is about replicas" in finished.stderr


def test_an_address_that_is_not_this_machine_s_is_named():
    finished = run("--embedded", "--tool_type", "calculator", "--host", "192.0.2.1")
    assert finished.returncode == 1
    assert "192.0.2.1:5000 cannot be listened on" in finished.stderr


def test_it_imports_no_ray():
    look = "import sys, verl_tool.servers.ray_serve, verl_tool.servers.embedded; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0
