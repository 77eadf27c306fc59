from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from server_command import start
from typer.testing import CliRunner

from tests.servers.tools.actions import text
from verl_tool.client import ToolClient
from verl_tool.servers.tools import load_tools
from verl_tool.servers.tools.new import app

pytestmark = pytest.mark.slow


def written(folder: Path, name: str, *options: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    result = CliRunner().invoke(app, [name, "--folder", str(folder), *options], env={"COLUMNS": "200"})
    return result.exit_code, result.output


async def test_it_writes_a_tool_that_loads_and_says_how_to_go_on(tmp_path: Path) -> None:
    code, output = written(tmp_path / "mine", "my_tool")
    file = tmp_path / "mine" / "my_tool.py"
    assert code == 0
    assert f"python -m verl_tool.servers.ray_serve --embedded --tool_type {file}" in output
    [tool] = load_tools(str(file))
    assert tool.name == "my_tool"
    assert await text(tool, '<my_tool>{"text": "abc", "times": 2}</my_tool>') == "cbacba"


@pytest.mark.parametrize(
    ("options", "owner", "line", "broken", "passed", "failed"),
    [
        ([], "def my_tool(", "[::-1]", "", "4 passed", "3 failed, 1 passed"),
        (["--state"], "class MyToolTools(TrajectoryTools)", "self.left -= count", "pass", "2 passed", "2 failed"),
    ],
)
def test_the_test_that_it_writes_passes_and_could_fail(
    tmp_path: Path, options: list[str], owner: str, line: str, broken: str, passed: str, failed: str
) -> None:
    code, _ = written(tmp_path, "my_tool", *options)
    assert code == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_my_tool.py")]
    file = tmp_path / "my_tool.py"
    assert owner in file.read_text()
    for told in (passed, failed):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
        assert told in done.stdout
        file.write_text(file.read_text().replace(line, broken))


async def test_what_it_writes_serves(tmp_path: Path) -> None:
    written(tmp_path, "my_tool")
    for server in start(tmp_path, "--embedded", "--tool_type", str(tmp_path / "my_tool.py")):
        server.wait_until_ready()
        async with ToolClient(server.url) as client:
            [described] = await client.tools()
            assert described.parameters["properties"]["times"]["maximum"] == 100
            result = await client.call("a", "<my_tool>abc</my_tool>", step=0)
            assert "cba" in result.observation


@pytest.mark.parametrize("name", ["two words", "class", "print", "a-b", "über", "", "a/b", "x" * 65])
def test_what_cannot_name_a_function_is_refused(tmp_path: Path, name: str) -> None:
    code, output = written(tmp_path, name)
    assert code == 2
    assert "cannot name a tool's function" in output
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "test_my_tool.py").write_text("mine")
    code, output = written(tmp_path, "my_tool")
    assert code == 2
    assert "is there already" in output
    assert [path.name for path in tmp_path.iterdir()] == ["test_my_tool.py"]
