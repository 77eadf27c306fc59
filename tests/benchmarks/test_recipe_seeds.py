"""What the benchmark of a recipe's seeds makes of its runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from script_module import load_script

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from verl_tool.trainer.monitoring.run_metrics import Curve

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "recipe_seeds.py"


@pytest.fixture(scope="module")
def benchmark():
    return load_script("recipe_seeds", BENCHMARK)


@pytest.fixture
def script(benchmark, tmp_path):
    """A recipe with a script that leaves metrics and ends as it is told to."""
    path = tmp_path / "train.sh"
    recipe = replace(benchmark.RECIPE["calculator"], script=path)

    def write(after: float, status: int, report: bool = True) -> Any:
        steps = [
            (0, {recipe.after: 0.2, recipe.without_tool: 0.0}),
            (1, {benchmark.KL: 0.03}),
            (10, {recipe.after: after, recipe.without_tool: 0.1, benchmark.KL: 0.01}),
        ]
        lines = "\n".join(json.dumps({"step": step, "data": data}) for step, data in steps)
        reported = "touch $RUN/learning_curve.png\n" if report else ""
        began = f"echo x >> $RUN/started\ncat > $RUN/metrics.jsonl <<'X'\n{lines}\nX\n"
        path.write_text(f"{began}{reported}exit {status}\n")
        return recipe

    return write


def test_a_seed_with_a_result_is_not_run_again(benchmark, script, tmp_path):
    recipe = script(after=0.97, status=0)
    first = benchmark.run_seed(recipe, 3, tmp_path / "seed_3", "grpo", 60)
    told = (first.seed, first.before, first.after, first.without_tool, first.highest_kl, first.crashed)
    assert told == (3, 0.2, 0.97, 0.1, 0.03, False)
    assert benchmark.run_seed(recipe, 3, tmp_path / "seed_3", "grpo", 60) == first
    assert (tmp_path / "seed_3" / "started").read_text() == "x\n"


def test_a_seed_below_the_mark_has_a_result_and_a_crashed_one_is_tried_again(benchmark, script, tmp_path):
    recipe = script(after=0.5, status=1)
    assert not benchmark.run_seed(recipe, 0, tmp_path / "weak", "grpo", 60).crashed
    for seed, status in ((1, 1), (2, 2)):
        script(after=0.99, status=status, report=False)
        for _ in range(2):
            assert benchmark.run_seed(recipe, seed, tmp_path / f"bad_{seed}", "grpo", 60).crashed
        assert (tmp_path / f"bad_{seed}" / "started").read_text() == "x\nx\n"


def test_the_table_counts_what_reached_the_mark(benchmark):
    results = [
        benchmark.SeedResult(0, 0.2, 0.96, 0.0, 0.004, 60.0, False),
        benchmark.SeedResult(1, 0.3, 0.94, 0.1, 0.0261, 120.0, False),
        benchmark.SeedResult(2, 0.0, 0.0, 0.0, 0.0, 5.0, True),
    ]
    text = benchmark.table(results, 0.95)
    assert "1 of 3 at 95% or more, 1 crashed." in text
    assert "| 1 | 30.0% | 94.0% | 10.0% | 0.026 | 2.0 | below 95% |" in text
    assert "| mean ± deviation | 25.0% ± 7.1% | 95.0% ± 1.4% |" in text


def test_a_recipe_may_tell_nothing_without_the_tool(benchmark, script, tmp_path):
    recipe = replace(script(after=0.2, status=0), without_tool=None)
    result = benchmark.run_seed(recipe, 0, tmp_path / "run", "grpo", 60)
    assert "| 0 | 20.0% | 20.0% | - | 0.03 |" in benchmark.table([result], recipe.wanted)
    two = benchmark.table([result, replace(result, seed=1)], recipe.wanted)
    assert "| mean ± deviation | 20.0% ± 0.0% | 20.0% ± 0.0% | - | |" in two


def test_every_recipe_s_script_is_there(benchmark):
    assert all(recipe.script.is_file() for recipe in benchmark.RECIPE.values())


def test_curves_of_different_lengths_are_drawn(benchmark, tmp_path):
    held_out = [Curve([0, 10, 20], [0.2, 0.9, 0.97]), Curve([0, 10], [0.3, 0.8])]
    benchmark.draw(held_out, [Curve([1, 2], [0.2, 0.3]), Curve([], [])], tmp_path / "curves.png", 0.95)
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_held_out_problems_of_two_kinds_count_alike(benchmark):
    metrics = [(0, {"one": 0.5, "two": 0.1}), (1, {"one": 0.9}), (2, {"one": 1.0, "two": 0.8})]
    assert benchmark.mean_curve(metrics, "one+two") == Curve([0, 2], [pytest.approx(0.3), pytest.approx(0.9)])
    assert benchmark.mean_curve(metrics, "one") == Curve([0, 1, 2], [0.5, 0.9, 1.0])
