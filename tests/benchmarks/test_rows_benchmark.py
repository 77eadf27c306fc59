"""The benchmark of cut rollouts, at a size that takes no time."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("verl")

from typer.testing import CliRunner

from benchmarks import rows

pytestmark = pytest.mark.slow


def test_it_reports_tokens_steps_and_dummies_of_each_cut(tmp_path):
    app = rows.typer.Typer()
    app.command()(rows.main)
    path = tmp_path / "rows.json"
    options = ["--rollouts", "16", "--response", "16", "--prompt", "4", "--summary", "2", "--repeats", "1"]
    outcome = CliRunner().invoke(app, [*options, "--no-memory", "--json", str(path)])
    assert outcome.exit_code == 0, outcome.output
    cells = json.loads(path.read_text())
    assert [cell["tokens"] for cell in cells[:4]] == [16 * (16 + 4 * k + 2 * (k - 1)) for k in (1, 2, 4, 8)]
    assert {cell["optimizer_steps"] for cell in cells} == {4}
    assert [cell["verl_optimizer_steps"] for cell in cells[:4]] == [4, 8, 16, 32]
    assert all(cell["update_seconds"] > 0 for cell in cells)


def test_what_does_not_go_is_refused():
    app = rows.typer.Typer()
    app.command()(rows.main)
    assert CliRunner().invoke(app, ["--rollouts", "17"]).exit_code == 2


@pytest.mark.e2e
def test_memory_is_that_of_a_process_of_its_own():
    assert rows.growth_in_child("update", "window", 2, 16, rows.Shape(16, 256, 2)) > 1
