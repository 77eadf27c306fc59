"""The clients of openenv 0.10 themselves, in a virtual environment of their own, play tools and tasks of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from served_episodes import QUESTION, peer_python, row_file, run_peer, served, workspace_row

from verl_tool.environments.served.openenv import OpenEnvApp
from verl_tool.servers.tools import load_tools

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CLIENT = Path(__file__).with_name("openenv_client.py").read_text()


async def played(url: str, tool: str, arguments: dict[str, Any], answer: str) -> dict[str, Any]:
    return json.loads((await run_peer("openenv", CLIENT, url, tool, json.dumps(arguments), answer)).splitlines()[-1])


async def test_they_play_a_question_with_python_code(servers, tmp_path):
    peer_python("openenv")
    async with served(servers, OpenEnvApp, *load_tools("python_code"), rows=row_file(tmp_path, QUESTION)) as (url, _):
        seen = await played(url, "python_code", {"code": "print(6*7)"}, "It is 42")
        assert seen["reset"]["messages"] == QUESTION["prompt"]
        assert "42" in seen["step"]["result"]["data"]
        assert (seen["end"], seen["tools_end"]) == ([1.0, True], [1.0, True])
        assert seen["state"]["step_count"] == 2
        assert "VALIDATION_ERROR" in seen["error"]
        assert seen["tools"] == ["python_code", "submit_answer"]
        assert "42" in seen["called"]
        assert "is unknown" in seen["unknown"]


async def test_they_solve_a_task_in_a_workspace(servers, tmp_path):
    peer_python("openenv")
    rows, options = row_file(tmp_path, workspace_row()), {"call_seconds": 60.0}
    async with served(servers, OpenEnvApp, *load_tools("bash_terminal"), rows=rows, **options) as (url, _):
        command = {"command": "cat question.txt; echo 42 > answer.txt"}
        seen = await played(url, "bash_terminal", command, "")
        assert "What is 6*7?" in seen["step"]["result"]["data"]
        assert (seen["end"], seen["tools_end"]) == ([1.0, True], [1.0, True])
