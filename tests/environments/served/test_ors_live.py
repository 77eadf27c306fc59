"""The client of openreward 0.1.167 itself, in a virtual environment of its own, plays a task of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from served_episodes import QUESTION, peer_python, row_file, run_peer, served

from verl_tool.environments.served.ors import OrsApp
from verl_tool.servers.tools import load_tools

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CLIENT = Path(__file__).with_name("ors_client.py").read_text()


async def test_it_plays_a_question_with_python_code(servers, tmp_path):
    peer_python("openreward")
    options = {"rows": row_file(tmp_path, QUESTION), "app_options": {"api_key": "secret"}}
    async with served(servers, OrsApp, *load_tools("python_code"), **options) as (url, _):
        output = await run_peer("openreward", CLIENT, url, "python_code", '{"code": "print(6*7)"}', "It is 42")
        seen = json.loads(output.splitlines()[-1])
        assert seen["splits"] == ["train"]
        assert seen["tasks"] == [{"index": 0, "messages": QUESTION["prompt"]}]
        assert seen["prompt"] == ["What is 6*7?"]
        assert seen["tools"] == ["python_code"]
        assert "42" in seen["step"][0][0]
        assert "is unknown" in seen["unknown"]
        assert seen["end"] == [1.0, True]
