"""The calculator recipe with several seeds: `python benchmarks/calculator_seeds.py --seeds 10`.

Each seed makes its own data, model and training, by the recipe's own script. A seed that has its result is not run
again, so that a benchmark that was broken off goes on where it was. A seed that crashes counts as one that failed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import typer
from rich.console import Console
from tqdm import tqdm

from verl_tool.trainer.run_metrics import Curve, curve, read_metrics

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SCRIPT = Path(__file__).parents[1] / "examples" / "train" / "calculator" / "train.sh"
WITH_TOOL = "val-core/calculator/acc/mean@1"
WITHOUT_TOOL = "val-core/calculator_without_tool/acc/mean@1"
RESULT = "seed_result.json"
WANTED = 0.95
console = Console()


@dataclass(frozen=True)
class SeedResult:
    """How one seed ended. Shares of the held-out problems that were answered exactly, sampled."""

    seed: int
    before: float
    after: float
    without_tool: float
    seconds: float
    """From the script's start to its end."""
    crashed: bool


def run_seed(seed: int, folder: Path, algorithm: str, seconds: float) -> SeedResult:
    """Train with this seed in `folder`, or read what an earlier benchmark found there."""
    kept = folder / RESULT
    if kept.exists():
        return SeedResult(**json.loads(kept.read_text(encoding="utf-8")))
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"SEED": str(seed), "RUN": str(folder), "ALGORITHM": algorithm}
    began = time.monotonic()
    with open(folder / "printed.log", "ab") as log:
        # 1: the recipe's own word for "below 95%".
        try:
            status = subprocess.run(
                ["bash", str(SCRIPT)], env=os.environ | settings, stdout=log, stderr=log, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    result = _result(seed, folder, time.monotonic() - began, status not in (0, 1))
    if not result.crashed:
        kept.write_text(json.dumps(asdict(result)), encoding="utf-8")
    return result


def _result(seed: int, folder: Path, seconds: float, crashed: bool) -> SeedResult:
    try:
        metrics = read_metrics(folder)
        with_tool, without = curve(metrics, WITH_TOOL).values, curve(metrics, WITHOUT_TOOL).values
    except FileNotFoundError:
        with_tool, without = [], []
    if crashed or not with_tool or not without:
        return SeedResult(seed, 0.0, 0.0, 0.0, seconds, True)
    return SeedResult(seed, with_tool[0], with_tool[-1], without[-1], seconds, False)


def table(results: list[SeedResult]) -> str:
    """Markdown: one line a seed, then mean and spread."""
    lines = ["| seed | before | after | without the tool | minutes | |", "|---|---|---|---|---|---|"]
    for r in results:
        word = "crashed" if r.crashed else "" if r.after >= WANTED else "below 95%"
        shares = f"{r.before:.1%} | {r.after:.1%} | {r.without_tool:.1%}"
        lines.append(f"| {r.seed} | {shares} | {r.seconds / 60:.1f} | {word} |")
    done = [r for r in results if not r.crashed]
    if len(done) > 1:
        spread = [
            f"{statistics.mean(v):.1%} ± {statistics.stdev(v):.1%}" for v in zip(*map(_shares, done), strict=True)
        ]
        minutes = statistics.mean(r.seconds for r in done) / 60
        lines.append(f"| mean ± deviation | {' | '.join(spread)} | {minutes:.1f} | |")
    good = sum(r.after >= WANTED for r in done)
    return "\n".join([*lines, "", f"{good} of {len(results)} at 95% or more, {len(results) - len(done)} crashed."])


def _shares(result: SeedResult) -> tuple[float, float, float]:
    return result.before, result.after, result.without_tool


def draw(curves: list[Curve], path: Path) -> None:
    """Each seed's success on held-out problems, and mean and spread where all seeds have told theirs."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for one in curves:
        axes.plot(one.steps, one.values, color="tab:blue", alpha=0.25)
    common = sorted(set.intersection(*(set(one.steps) for one in curves)))
    at = [[one.values[one.steps.index(step)] for one in curves] for step in common]
    means = [statistics.mean(values) for values in at]
    axes.plot(common, means, "o-", color="tab:blue", label=f"mean of {len(curves)} seeds")
    lowest, highest = [min(values) for values in at], [max(values) for values in at]
    axes.fill_between(common, lowest, highest, alpha=0.15, color="tab:blue", label="lowest to highest")
    axes.axhline(WANTED, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step", ylabel="success on held-out problems", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(
    seeds: Annotated[int, typer.Option(help="How many; seeds are 0, 1, …", min=1)] = 10,
    algorithm: Annotated[str, typer.Option(help="grpo or gae (PPO with a critic).")] = "grpo",
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("outputs/benchmarks/calculator_seeds"),
    minutes: Annotated[float, typer.Option(help="The longest that one seed may take.")] = 60.0,
) -> None:
    """Run all seeds, print the table, draw the curves. Exits with 1 if a seed crashed or stayed below 95%."""
    output = (output / algorithm).resolve()
    results = []
    for seed in tqdm(range(seeds), desc="seeds", unit="seed", file=sys.stderr):
        results.append(run_seed(seed, output / f"seed_{seed}", algorithm, minutes * 60))
        tqdm.write(f"seed {seed}: {results[-1]}", file=sys.stderr)
    curves = [curve(read_metrics(output / f"seed_{r.seed}"), WITH_TOOL) for r in results if not r.crashed]
    if curves:
        draw(curves, output / "curves.png")
    (output / "table.md").write_text(table(results) + "\n", encoding="utf-8")
    console.print(table(results), soft_wrap=True)
    console.print(f"curves: {output}/curves.png    table: {output}/table.md")
    if any(r.crashed or r.after < WANTED for r in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
