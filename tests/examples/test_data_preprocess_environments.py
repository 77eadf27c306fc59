"""Examples that a package lists become rows that the gateway's preset plays."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from verl_tool.agent_loop.row import build_call_extra
from verl_tool.gateway.agent_host import AgentTask
from verl_tool.verification import EnvironmentVerification, verification_of

pytest.importorskip("datasets")
pd = pytest.importorskip("pandas")
pytest.importorskip("verl_tool.gateway.agent_host")

EXAMPLES = [
    {"messages": [{"role": "user", "content": "What is 0+0?"}], "id": "e393cb4b"},
    {"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "What is 1+1?"}], "id": None},
    {"messages": [{"role": "user", "content": "What is 2+2?"}], "id": "f8058904"},
]
"""As environment_program.py lists them."""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "data_preprocess"))


def run(folder: Path, script: str, *options: str) -> Result:
    """Make rows, with a shell script in place of verifiers' Python."""
    python = folder / "verifiers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    app = typer.Typer(add_completion=False)
    app.command()(importlib.import_module("environment_programs").main)
    options = ("--package", "verifiers", "--name", "toy-sums", "--install", str(folder), *options)
    return CliRunner().invoke(app, [*options, "--local_dir", str(folder / "data")])


@pytest.mark.usefixtures("scripts")
def test_examples_become_rows(tmp_path: Path) -> None:
    lines = "\n".join(map(json.dumps, EXAMPLES))
    script = f"[ \"$3$4$5\" = 'toy-sums{{\"a\": 1}}7' ] || exit 1\necho 'a progress bar'\ncat <<'END'\n{lines}\nEND"
    result = run(tmp_path, script, "--arguments", '{"a": 1}', "--limit", "7", "--test_size", "1")
    assert result.exit_code == 0, (result.output, result.exception)
    rows: list[dict[str, Any]] = []
    for split in ("train", "test"):
        rows += pd.read_parquet(tmp_path / "data" / f"{split}.parquet").to_dict("records")
    found = {}
    for row in rows:
        extra = build_call_extra(row["extra_info"]["tools_kwargs"], None, "row")
        verification = verification_of(row["reward_model"], "row", in_environment=True)
        task = AgentTask.of_row(row["prompt"], extra, verification, "row", judges=True)
        assert isinstance(verification, EnvironmentVerification)
        assert task.environment is not None
        found[task.environment["index"]] = (task.environment, list(task.messages))
    for index, example in enumerate(EXAMPLES):
        environment = {"name": "toy-sums", "index": index, "id": example["id"], "arguments": {"a": 1}}
        assert found[index] == (environment, example["messages"])


@pytest.mark.usefixtures("scripts")
def test_what_the_package_says_is_passed_on(tmp_path: Path) -> None:
    result = run(tmp_path, "echo 'no such taskset' >&2; exit 1")
    assert isinstance(result.exception, ValueError)
    assert "verifiers does not list toy-sums: no such taskset" in str(result.exception)
