"""A recipe's small form with several seeds: `python benchmarks/recipe_seeds.py acecoder --seeds 4`.

Each seed makes its own model and training (the calculator: data too) by the recipe's own script, on a CPU. A seed that
has its result is not run again, so that a benchmark that was broken off goes on where it was. A seed that crashes has
failed.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import matplotlib
import typer
from rich.console import Console
from tqdm import tqdm

from verl_tool.trainer.monitoring.run_metrics import Curve, Metrics, curve, read_metrics

matplotlib.use("Agg")
from matplotlib import pyplot as plt

RECIPES = Path(__file__).parents[1] / "examples" / "train"
KL = "actor/ppo_kl"
SAMPLED = "agent/success/mean"
RESULT = "seed_result.json"
REPORTED = "learning_curve.png"
"""Left in a run's folder by its report, which is the last thing that a recipe does."""
console = Console()


@dataclass(frozen=True)
class Recipe:
    """A script, and what to look for in the metrics of its runs."""

    script: Path
    after: str
    """Metric: share of the held-out problems that are solved. Several, of as many problems each, with ``+`` between."""
    without_tool: str | None
    """The same of the same model with the tool taken away; None if the recipe does not tell it."""
    wanted: float
    """Of `after`, at the end."""


CALCULATOR, ACECODER, NO_TOOL = "calculator", "acecoder", "acecoder_no_tool"
FUNCTIONS, TERMINAL = "function_calling", "terminal"
SEARCH, PAGES, SKYSQL = "search_r1", "long_document", "skysql"
TOOLS, PIXELS, AGENT, ISSUES, ASK = "multi_tool", "pixel_reasoner", "unmodified_agent", "swe", "ask_the_user"
GAME, WEB = "text_game", "miniwob"
RECIPE: dict[str, Recipe] = {
    CALCULATOR: Recipe(
        RECIPES / "calculator" / "train.sh",
        "val-core/calculator/acc/mean@1",
        "val-core/calculator_without_tool/acc/mean@1",
        wanted=0.95,
    ),
    ACECODER: Recipe(
        RECIPES / "acecoder" / "train.sh",
        "val-core/acecoder/acc/mean@1",
        "val-core/acecoder_without_tool/acc/mean@1",
        wanted=0.85,
    ),
    NO_TOOL: Recipe(RECIPES / "acecoder" / "train_no_tool.sh", "val-core/acecoder/acc/mean@1", None, wanted=0.0),
    FUNCTIONS: Recipe(
        RECIPES / "function_calling" / "train.sh", "val-core/function_calling/acc/mean@1", None, wanted=0.9
    ),
    TERMINAL: Recipe(RECIPES / "terminal" / "train.sh", "val-core/terminal_tasks/acc/mean@1", None, wanted=0.9),
    SEARCH: Recipe(
        RECIPES / "search_r1" / "train.sh",
        "val-core/one_hop/acc/mean@1+val-core/two_hop/acc/mean@1",
        "val-core/without_tool/acc/mean@1",
        wanted=0.85,
    ),
    PAGES: Recipe(RECIPES / "long_document" / "train.sh", "val-core/long_document/acc/mean@1", None, wanted=0.85),
    SKYSQL: Recipe(RECIPES / "skysql" / "train.sh", "val-core/made_databases/acc/mean@1", None, wanted=0.85),
    TOOLS: Recipe(
        RECIPES / "multi_tool" / "train.sh",
        "+".join(f"val-core/multi_tool_{tool}/acc/mean@1" for tool in ("calculator", "search", "sql", "python")),
        None,
        wanted=0.85,
    ),
    AGENT: Recipe(RECIPES / "unmodified_agent" / "train.sh", "val-core/unmodified_agent/acc/mean@1", None, wanted=0.85),
    ISSUES: Recipe(RECIPES / "swe" / "train.sh", "val-core/one_line_bug/acc/mean@1", None, wanted=0.8),
    ASK: Recipe(RECIPES / "ask_the_user" / "train.sh", "val-core/ask_the_user/acc/mean@1", None, wanted=0.85),
    GAME: Recipe(RECIPES / "text_game" / "train.sh", "val-core/text_game/acc/mean@1", None, wanted=0.85),
    WEB: Recipe(
        RECIPES / "miniwob" / "train.sh",
        "+".join(f"val-core/miniwob/{page}/acc/mean@1" for page in ("click-test-2", "click-color", "focus-text-2")),
        None,
        wanted=0.85,
    ),
    PIXELS: Recipe(
        RECIPES / "pixel_reasoner" / "train.sh",
        "val-core/pixel_reasoner/acc/mean@1",
        "val-core/pixel_reasoner_without_tool/acc/mean@1",
        wanted=0.95,
    ),
}
RecipeName = Enum("RecipeName", {name: name for name in RECIPE}, type=str)


@dataclass(frozen=True)
class SeedResult:
    """How one seed ended. Shares of the held-out problems that were solved, as the recipe validates."""

    seed: int
    before: float
    after: float
    without_tool: float
    """NaN if the recipe does not tell it."""
    highest_kl: float
    """Of all steps."""
    seconds: float
    """From the script's start to its end."""
    crashed: bool


def run_seed(recipe: Recipe, seed: int, folder: Path, algorithm: str, seconds: float) -> SeedResult:
    """Train with this seed in `folder`, or read what an earlier benchmark found there."""
    kept = folder / RESULT
    if kept.exists():
        return SeedResult(**json.loads(kept.read_text(encoding="utf-8")))
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"PROFILE": "cpu", "SEED": str(seed), "RUN": str(folder), "ALGORITHM": algorithm}
    began = time.monotonic()
    with open(folder / "printed.log", "ab") as log:
        # 1: the calculator's report says "below 95%" so, and a training that fails ends so too.
        try:
            status = subprocess.run(
                ["bash", str(recipe.script)], env=os.environ | settings, stdout=log, stderr=log, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    ended = status == 0 or (status == 1 and (folder / REPORTED).exists())
    result = _result(recipe, seed, folder, time.monotonic() - began, not ended)
    if not result.crashed:
        kept.write_text(json.dumps(asdict(result)), encoding="utf-8")
    return result


def _result(recipe: Recipe, seed: int, folder: Path, seconds: float, crashed: bool) -> SeedResult:
    try:
        metrics = read_metrics(folder)
    except FileNotFoundError:
        metrics = []
    held_out = mean_curve(metrics, recipe.after).values
    without = curve(metrics, recipe.without_tool).values if recipe.without_tool else [math.nan]
    if crashed or not held_out or not without:
        return SeedResult(seed, 0.0, 0.0, 0.0, 0.0, seconds, True)
    kl = max(curve(metrics, KL).values, default=math.nan)
    return SeedResult(seed, held_out[0], held_out[-1], without[-1], kl, seconds, False)


def mean_curve(metrics: Metrics, names: str) -> Curve:
    """The mean of the metrics whose names `names` has, with ``+`` between, at the steps that told all of them."""
    curves = [curve(metrics, name) for name in names.split("+")]
    told = [dict(zip(one.steps, one.values, strict=True)) for one in curves]
    steps = [step for step in curves[0].steps if all(step in values for values in told)]
    return Curve(steps, [statistics.mean(values[step] for values in told) for step in steps])


def table(results: list[SeedResult], wanted: float) -> str:
    """Markdown: one line a seed, then mean and spread."""
    lines = ["| seed | before | after | without the tool | highest KL | minutes | |", "|---|--:|--:|--:|--:|--:|---|"]
    for r in results:
        word = "crashed" if r.crashed else "" if r.after >= wanted else f"below {wanted:.0%}"
        shares = " | ".join(_percent(value) for value in _shares(r))
        lines.append(f"| {r.seed} | {shares} | {r.highest_kl:.2g} | {r.seconds / 60:.1f} | {word} |")
    done = [r for r in results if not r.crashed]
    if len(done) > 1:
        columns = zip(*map(_shares, done), strict=True)
        spread = [_spread(column) for column in columns]
        minutes = statistics.mean(r.seconds for r in done) / 60
        lines.append(f"| mean ± deviation | {' | '.join(spread)} | | {minutes:.1f} | |")
    good = sum(r.after >= wanted for r in done)
    return "\n".join(
        [*lines, "", f"{good} of {len(results)} at {wanted:.0%} or more, {len(results) - len(done)} crashed."]
    )


def _shares(result: SeedResult) -> tuple[float, float, float]:
    return result.before, result.after, result.without_tool


def _spread(shares: Sequence[float]) -> str:
    if any(map(math.isnan, shares)):
        return "-"
    return f"{_percent(statistics.mean(shares))} ± {_percent(statistics.stdev(shares))}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def draw(curves: list[Curve], sampled: list[Curve], path: Path, wanted: float) -> None:
    """Each seed's success on held-out problems, mean and spread where all seeds have told theirs, and what was sampled
    in training."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for number, one in enumerate(sampled):
        label = "sampled in training, each seed" if number == 0 else None
        axes.plot(one.steps, one.values, color="tab:orange", alpha=0.5, linewidth=1, label=label)
    for one in curves:
        axes.plot(one.steps, one.values, color="tab:blue", alpha=0.25)
    common = sorted(set.intersection(*(set(one.steps) for one in curves)))
    at = [[one.values[one.steps.index(step)] for one in curves] for step in common]
    means = [statistics.mean(values) for values in at]
    axes.plot(common, means, "o-", color="tab:blue", label=f"held-out problems, mean of {len(curves)} seeds")
    lowest, highest = [min(values) for values in at], [max(values) for values in at]
    axes.fill_between(common, lowest, highest, alpha=0.15, color="tab:blue", label="lowest to highest")
    axes.axhline(wanted, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step", ylabel="success", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(
    recipe: Annotated[RecipeName, typer.Argument(help="Which recipe.")],
    seeds: Annotated[int, typer.Option(help="How many; seeds are 0, 1, …", min=1)] = 4,
    algorithm: Annotated[str, typer.Option(help="grpo or gae (PPO with a critic).")] = "grpo",
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("outputs/benchmarks/seeds"),
    minutes: Annotated[float, typer.Option(help="The longest that one seed may take.")] = 60.0,
) -> None:
    """Run all seeds, print the table, draw the curves. Exits with 1 if a seed crashed or ended too low."""
    wanted = RECIPE[recipe.value]
    output = (output / recipe.value / algorithm).resolve()
    results = []
    for seed in tqdm(range(seeds), desc="seeds", unit="seed", file=sys.stderr):
        results.append(run_seed(wanted, seed, output / f"seed_{seed}", algorithm, minutes * 60))
        tqdm.write(f"seed {seed}: {results[-1]}", file=sys.stderr)
    metrics = [read_metrics(output / f"seed_{r.seed}") for r in results if not r.crashed]
    if metrics:
        held_out, sampled = ([mean_curve(one, name) for one in metrics] for name in (wanted.after, SAMPLED))
        draw(held_out, sampled, output / "curves.png", wanted.wanted)
    (output / "table.md").write_text(table(results, wanted.wanted) + "\n", encoding="utf-8")
    console.print(table(results, wanted.wanted), soft_wrap=True)
    console.print(f"curves: {output}/curves.png    table: {output}/table.md")
    if any(r.crashed or r.after < wanted.wanted for r in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
