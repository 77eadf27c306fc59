"""The benchmark of environments, at a size that takes no time, against a stand-in for a package and its client."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from script_module import load_script
from typer.testing import CliRunner

BENCHMARK = Path(__file__).parents[2] / "benchmarks/environments.py"
STAND_IN = Path(__file__).parents[1] / "environments/counting_gym.py"

pytestmark = pytest.mark.slow


def test_it_reports_steps_a_second_of_each_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    benchmark = load_script("environments_benchmark", BENCHMARK)
    interpreter = tmp_path / "peers/nemo_gym/bin/python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f'#!/bin/sh\nif [ "$3" = nemo_gym ]; then echo 7 0.5; else exec {sys.executable} "$@"; fi\n')
    interpreter.chmod(0o755)
    case = replace(benchmark.CASES["nemo_gym"], server=STAND_IN, server_arguments=())
    monkeypatch.setitem(benchmark.CASES, "nemo_gym", case)
    app = benchmark.typer.Typer()
    app.command()(benchmark.main)
    written = tmp_path / "speeds.json"
    options = ["--only", "nemo_gym", "--steps", "1", "--total-steps", "1", "--json", str(written)]
    outcome = CliRunner().invoke(app, ["--peers", str(tmp_path / "peers"), *options])
    assert outcome.exit_code == 0, outcome.output
    speeds = json.loads(written.read_text())
    assert [speed["at_once"] for speed in speeds] == [1, 8, 64]
    assert {(speed["own_client"], speed["own_client_cpu"]) for speed in speeds} == {(7, 0.5)}
    assert all(speed["adapter"] > 0 and speed["tool_server"] > 0 for speed in speeds)
