"""simple_agent of nemo-gym 0.7 itself, in an environment of its own, solves rows on our tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from served_episodes import QUESTION, peer_python, row_file, run_peer, served, workspace_row

from verl_tool.environments.served.nemo_gym import NemoGymApp, write_rows
from verl_tool.environments.served.task_rows import TaskRows
from verl_tool.servers.tools import load_tools

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AGENT = Path(__file__).with_name("nemo_gym_agent.py").read_text()


def call(name: str, **arguments: Any) -> dict[str, Any]:
    fields = {"id": "f1", "call_id": "c1", "name": name, "arguments": json.dumps(arguments), "status": "completed"}
    return {"type": "function_call", **fields}


def message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": "m1", "type": "message", "role": "assistant", "status": "completed", "content": content}


async def solved(servers: Any, folder: Path, tool: str, row: dict[str, Any], *turns: Any, **options: Any) -> Any:
    """The answers of the agent's ``/run``, and of its ``/aggregate_metrics``, to a policy that says `turns`."""
    peer_python("nemo_gym")
    file, written = row_file(folder, row), folder / "nemo.jsonl"
    async with served(servers, NemoGymApp, *load_tools(tool), rows=file, **options) as (url, episodes):
        write_rows(TaskRows(file), await episodes.tools(), written, "agent")
        port = url.rpartition(":")[2]
        output = await run_peer("nemo_gym", AGENT, port, json.dumps(turns), written.read_text())
        answers = [json.loads(line) for line in output.splitlines() if line.startswith('{"status"')]
        assert [each["status"] for each in answers] == [200, 200], output
        return answers[0]["answer"], answers[1]["answer"]


async def test_it_solves_a_question_with_the_calculator(servers, tmp_path):
    turns = call("calculator", expression="6*7"), message("It is 42")
    answer, metrics = await solved(servers, tmp_path, "calculator", QUESTION, *turns)
    assert (answer["reward"], answer["mask_sample"], answer["failure_kind"]) == (1.0, False, None)
    [output] = [item for item in answer["response"]["output"] if item["type"] == "function_call_output"]
    assert output["output"] == "42"
    assert metrics["agent_metrics"] == {"mean/reward": 1.0, "masked": 1.0}


async def test_it_solves_a_task_in_a_workspace(servers, tmp_path):
    turns = call("bash_terminal", command="echo 42 > answer.txt"), message("done")
    answer, _ = await solved(servers, tmp_path, "bash_terminal", workspace_row(), *turns, call_seconds=60.0)
    assert (answer["reward"], answer["mask_sample"]) == (1.0, False)
