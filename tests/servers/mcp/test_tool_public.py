"""Public MCP servers from PyPI, in the sandbox, as users have them. Both need no network."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_tool import ask, serving

from verl_tool.servers.mcp.config import McpConfig

pytestmark = pytest.mark.slow


def config(name: str, module: str, *args: str, **settings: Any) -> McpConfig:
    entry = {"command": "python", "args": ["-m", module, *args], "start_seconds": 100, "timeout_seconds": 60}
    return McpConfig.parse({"mcpServers": {name: {**entry, **settings}}})


async def test_the_time_server() -> None:
    async with serving(config("time", "mcp_server_time", stateful=False)) as toolset:
        assert {each.name for each in toolset.describe()} == {"mcp__time__get_current_time", "mcp__time__convert_time"}
        there = {"source_timezone": "Europe/Warsaw", "time": "12:00", "target_timezone": "Asia/Tokyo"}
        converted = await ask(toolset, "time__convert_time", there)
        assert converted.fault is None, converted.fault
        assert "Asia/Tokyo" in converted.observation
        wrong = await ask(toolset, "time__get_current_time", {"timezone": "Mars/Olympus"})
        assert (wrong.fault, wrong.metrics) == (None, {"error": 1.0})


@pytest.fixture
def repository(tmp_path: Path) -> str:
    """A repository that others may read."""
    path = tmp_path / "repository"
    path.mkdir()
    git(str(path), "init", "-q")
    author = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    git(str(path), *author, "commit", "-q", "--allow-empty", "-m", "The first commit")
    subprocess.run(["chmod", "-R", "o+rX", path], check=True)
    return str(path)


def git(repository: str, *words: str) -> str:
    return subprocess.run(["git", "-C", repository, *words], check=True, capture_output=True, text=True).stdout


async def test_the_git_server_reads_a_repository_and_cannot_change_it(repository: str) -> None:
    # In the sandbox the server is another user, whom git does not trust with the repository of this one.
    trusted = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    async with serving(
        config("git", "mcp_server_git", "-r", repository, readable=[repository], env=trusted)
    ) as toolset:
        log = await ask(toolset, "git__git_log", {"repo_path": repository}, step=0)
        assert log.fault is None, log.fault
        assert "The first commit" in log.observation
        made = await ask(toolset, "git__git_create_branch", {"repo_path": repository, "branch_name": "mine"}, step=1)
        assert made.metrics == {"error": 1.0}
        assert await asyncio.to_thread(git, repository, "branch", "--list", "mine") == ""
