"""``python -m verl_tool.servers.ray_serve`` as a user runs it: starts, tells, refuses, stops and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import typer
from serve_harness import DATA, observed, post
from server_command import READY_SECONDS, STOP_SECONDS, Server, gone, run, start
from typer.testing import CliRunner

from verl_tool.client import ToolClient
from verl_tool.formats import Call
from verl_tool.servers.ray_serve import serve_tools
from verl_tool.servers.server_console import way_to_try
from verl_tool.servers.tools.base import Context, Tool, ToolResult
from verl_tool.util.child_processes import HEAD

pytestmark = pytest.mark.slow

LITTLE = ("--cpus_per_replica", "0.1")
slow = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(180)]

RAY_AGENTS = ("ray::RuntimeEnvAgent", "ray::DashboardAgent")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    yield from start(tmp_path, *LITTLE, "--tool_type", f"calculator,{DATA / 'ray_counter.py'}", "--num_replicas", "2")


@pytest.fixture
def own_tool(tmp_path: Path) -> Path:
    """A user's tool file, to be edited while it serves."""
    return Path(shutil.copy(DATA / "ray_echo.py", tmp_path / "own_echo.py"))


@pytest.fixture
def server_of_own_tool(tmp_path: Path, own_tool: Path) -> Iterator[Server]:
    yield from start(tmp_path, *LITTLE, "--tool_type", str(own_tool))


@pytest.fixture
def server_that_cannot_isolate(tmp_path: Path) -> Iterator[Server]:
    yield from start(tmp_path, *LITTLE, "--tool_type", str(DATA / "ray_unsafe.py"))


class TestServing:
    pytestmark = slow

    async def test_it_serves_and_a_sigint_leaves_no_process(self, server):
        printed = server.wait_until_ready()
        assert re.search(r"calculator +│ yes", printed)
        assert re.search(r"ray_counter +│ yes", printed)
        assert re.search(r"finish +│ no +│ not in --tool_type", printed)
        assert f"{server.url}/get_observation" in printed
        async with aiohttp.ClientSession() as session:
            status, answer = await post(session, server.url, ["a", "b"], "<calculator>13.1-3</calculator>")
        assert status == 200
        assert ["10.1" in text for text in answer["observations"]] == [True, True]

        second = run("--port", str(server.port), "--tool_type", "calculator")
        assert second.returncode == 1
        assert f"port {server.port} belongs to another tool server" in second.stderr

        family = server.family()
        # As the terminal does: to every process of the group.
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(timeout=STOP_SECONDS) == 0
        assert gone(family, seconds=10) == []

    async def test_it_takes_up_an_edited_tool_and_leaves_no_process_when_killed(self, server_of_own_tool, own_tool):
        server = server_of_own_tool
        server.wait_until_ready()
        own_tool.write_text(own_tool.read_text().replace('f"{text}@', 'f"edited-{text}@'))
        server.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + READY_SECONDS
        while "\nupdated" not in server.output():
            assert time.monotonic() < deadline, server.output()
            await asyncio.sleep(0.2)
        async with aiohttp.ClientSession() as session:
            status, answer = await post(session, server.url, ["a"], "<ray_echo>x</ray_echo>")
        assert (status, observed(answer["observations"][0])[0]) == (200, "edited-x")

        family = server.family()
        # Two helpers of Ray's look every few seconds whether the cluster is there, and end after five looks in vain.
        family = [process for process in family if process.name() not in RAY_AGENTS]
        server.process.kill()
        server.process.wait(timeout=STOP_SECONDS)
        assert gone(family, seconds=STOP_SECONDS) == []

    async def test_the_death_of_all_replicas_is_outlasted_and_that_of_rays_head_leaves_no_process(self, server):
        server.wait_until_ready()
        async with ToolClient(server.url, timeout=120.0) as client:
            for process in server.family():
                if "ServeReplica" in process.name():
                    process.kill()
            result = await client.call("a", "<calculator>13.1-3</calculator>", step=0)
        assert result.fault is None
        assert "10.1" in result.observation

        family = server.family()
        (head,) = (process for process in family if process.name() == HEAD)
        head.kill()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(timeout=STOP_SECONDS) == 0
        assert gone(family, seconds=2) == []

    def test_a_replica_that_cannot_start_is_told_in_its_own_words(self, server_that_cannot_isolate):
        server = server_that_cannot_isolate
        assert server.process.wait(timeout=READY_SECONDS) == 1
        assert server.output().count("cannot serve: no isolation on Sundays; come back on Monday") == 1


def refusal(*arguments: str) -> str:
    """What the command prints when it ends with 2, in this process."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(serve_tools)
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num_replicas", "many"], "--num_replicas is 'many'; give a number from 1, or 'auto'"),
        (["--num_replicas", "[/bold]"], "--num_replicas is '[/bold]'"),
        (["--port", "70000"], "--port"),
        (["--tool_config", "/nowhere/config.json"], "/nowhere/config.json cannot be read"),
        (["--workers_per_tool", "0"], "--workers_per_tool"),
        (["--tool_type", "calculater"], "tool 'calculater' is unknown; known: audio_crop, bash_terminal"),
    ],
)
def test_a_wrong_option_is_named_before_anything_starts(arguments, words):
    assert words in refusal("--tool_type", "calculator", *arguments)


def test_too_few_open_files_are_told():
    finished = run("--tool_type", "calculator", by=("prlimit", "--nofile=256:256", "--"))
    assert finished.returncode == 1
    assert "a process may open 256 files here (`ulimit -n`)" in finished.stderr


def test_the_help_tells_every_option():
    told = run("--help").stdout
    for option in (
        "--host", "--port", "--tool_type", "--num_replicas", "--workers_per_tool", "--max_concurrent_requests",
        "--tool_config", "--api_key", "--ray_address", "--done_if_invalid", "--isolation", "--state_ttl", "--log_level",
    ):  # fmt: skip
        assert option in told
    assert "VERL_TOOL_API_KEY" in told


@pytest.mark.parametrize(
    ("tool", "command"),
    [
        (
            "python_code",
            "python -m verl_tool.servers.tests.test_python_code_tool python --url=http://h/get_observation",
        ),
        (
            "calculator",
            "python -m verl_tool.servers.tests.test_calculator_tool calculator --url=http://h/get_observation",
        ),
        ("sql", "python -m verl_tool.servers.tests.test_sql_tool sql --db_id=ID --url=http://h/get_observation"),
        (
            "echo",
            """curl -s http://h/get_observation -d '{"trajectory_ids": ["a"], "actions": ["<echo>it'"'"'s</echo>"]}'""",
        ),
        ("silent", ""),
    ],
)
def test_the_command_to_try_is_one_that_there_is(tool: str, command: str) -> None:
    class Own(Tool):
        name = tool
        description = "Stands for a tool."
        example_actions = ("<echo>it's</echo>",) if tool != "silent" else ()

        async def run(self, call: Call, context: Context) -> ToolResult:
            return ToolResult()

    assert way_to_try([Own()], "http://h/get_observation") == command
