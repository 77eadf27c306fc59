"""What a recipe says at its end."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from script_module import load_script
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

REPORT = Path(__file__).parents[3] / "examples" / "train" / "report.py"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    """The script as a module; the calculator has one of the same name."""
    return load_script("recipe_report", REPORT)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was broken off behind its second step and made that step again."""
    starts = {
        "metrics.1.jsonl": [(0, {"val-core/a/acc/mean@1": 0.1}), (1, {"critic/score/mean": -0.5}), (2, {})],
        "metrics.jsonl": [(2, {"critic/score/mean": 0.25, "agent/tool_calls/mean": 1.0, "val-core/a/acc/mean@1": 0.6})],
    }
    for name, steps in starts.items():
        lines = [json.dumps({"step": step, "data": data}) for step, data in steps]
        (tmp_path / name).write_text("\n".join(lines))
    return tmp_path


def test_it_tells_first_and_last_and_draws(report, run):
    import typer

    app = typer.Typer()
    app.command()(report.main)
    result = CliRunner().invoke(app, [str(run)])
    assert result.exit_code == 0, result.exception
    told = {line.split()[1]: line.split()[3:6:2] for line in result.output.splitlines() if line.startswith("│")}
    assert told["critic/score/mean"] == ["-0.5", "0.25"]
    assert told["val-core/a/acc/mean@1"] == ["0.1", "0.6"]
    assert (run / "learning_curve.png").stat().st_size > 1000
