"""What the benchmark of the calculator's seeds makes of its runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from script_module import load_script

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from verl_tool.trainer.run_metrics import Curve

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "calculator_seeds.py"


@pytest.fixture(scope="module")
def benchmark():
    return load_script("calculator_seeds", BENCHMARK)


@pytest.fixture
def script(benchmark, tmp_path, monkeypatch):
    """In place of the recipe: a script that leaves metrics and ends as it is told to."""
    path = tmp_path / "train.sh"
    monkeypatch.setattr(benchmark, "SCRIPT", path)

    def write(after: float, status: int) -> None:
        steps = [
            (0, {benchmark.WITH_TOOL: 0.2, benchmark.WITHOUT_TOOL: 0.0}),
            (10, {benchmark.WITH_TOOL: after, benchmark.WITHOUT_TOOL: 0.1}),
        ]
        lines = "\n".join(json.dumps({"step": step, "data": data}) for step, data in steps)
        path.write_text(f"echo x >> $RUN/started\ncat > $RUN/metrics.jsonl <<'X'\n{lines}\nX\nexit {status}\n")

    return write


def test_a_seed_with_a_result_is_not_run_again(benchmark, script, tmp_path):
    script(after=0.97, status=0)
    first = benchmark.run_seed(3, tmp_path / "seed_3", "grpo", 60)
    assert (first.seed, first.before, first.after, first.without_tool, first.crashed) == (3, 0.2, 0.97, 0.1, False)
    assert benchmark.run_seed(3, tmp_path / "seed_3", "grpo", 60) == first
    assert (tmp_path / "seed_3" / "started").read_text() == "x\n"


def test_a_seed_below_the_mark_has_a_result_and_a_crashed_one_is_tried_again(benchmark, script, tmp_path):
    script(after=0.5, status=1)
    assert not benchmark.run_seed(0, tmp_path / "weak", "grpo", 60).crashed
    script(after=0.99, status=2)
    for _ in range(2):
        assert benchmark.run_seed(1, tmp_path / "bad", "grpo", 60).crashed
    assert (tmp_path / "bad" / "started").read_text() == "x\nx\n"


def test_the_table_counts_what_reached_the_mark(benchmark):
    results = [
        benchmark.SeedResult(0, 0.2, 0.96, 0.0, 60.0, False),
        benchmark.SeedResult(1, 0.3, 0.94, 0.1, 120.0, False),
        benchmark.SeedResult(2, 0.0, 0.0, 0.0, 5.0, True),
    ]
    text = benchmark.table(results)
    assert "1 of 3 at 95% or more, 1 crashed." in text
    assert "| 1 | 30.0% | 94.0% | 10.0% | 2.0 | below 95% |" in text
    assert "| mean ± deviation | 25.0% ± 7.1% | 95.0% ± 1.4% |" in text


def test_curves_of_different_lengths_are_drawn(benchmark, tmp_path):
    benchmark.draw([Curve([0, 10, 20], [0.2, 0.9, 0.97]), Curve([0, 10], [0.3, 0.8])], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
