"""What came of a run: `python examples/train/calculator/report.py outputs/calculator/grpo`.

Draws `learning_curve.png` and prints the success before and after, with and without the tool, and where the time went.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import typer
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TRAINED = "critic/score/mean"
WITH_TOOL = "val-core/calculator/acc/mean@1"
WITHOUT_TOOL = "val-core/calculator_without_tool/acc/mean@1"
CALLS = "agent/tool_calls/mean"
PHASES = {
    "rollout": "timing_s/gen",
    "log-probs": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "weight sync": "timing_s/update_weights",
    "validation": "timing_s/testing",
}


@dataclass(frozen=True)
class Curve:
    """One metric over the steps at which it was told."""

    steps: list[int]
    values: list[float]


def read_metrics(run: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and metrics of each line, in order of the steps. Of a step that was made again, the last time counts."""
    starts = sorted(run.glob("metrics.[0-9]*.jsonl"), key=lambda path: int(path.suffixes[0][1:]))
    told: dict[int, dict[str, float]] = {}
    for path in [*starts, run / "metrics.jsonl"]:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            told[entry["step"]] = entry["data"]
    return sorted(told.items())


def curve(metrics: list[tuple[int, dict[str, float]]], name: str) -> Curve:
    """A metric's course. Steps that do not tell it are left out."""
    told = [(step, data[name]) for step, data in metrics if name in data]
    return Curve([step for step, _ in told], [value for _, value in told])


def draw(metrics: list[tuple[int, dict[str, float]]], path: Path) -> None:
    """Reward and success against the step, tool calls below."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1))
    for name, label, style in (
        (TRAINED, "reward, sampled (training problems)", "-"),
        (WITH_TOOL, "success with the tool (held-out problems)", "o-"),
        (WITHOUT_TOOL, "success without the tool (held-out problems)", "s--"),
    ):
        found = curve(metrics, name)
        top.plot(found.steps, found.values, style, label=label)
    top.set(ylim=(0, 1.02), ylabel="share of problems")
    top.axhline(0.95, color="grey", linewidth=0.8, linestyle=":")
    top.legend(loc="center right")
    calls = curve(metrics, CALLS)
    bottom.plot(calls.steps, calls.values)
    bottom.set(xlabel="step", ylabel="tool calls")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def table(metrics: list[tuple[int, dict[str, float]]]) -> Table:
    """Before and after, with the tool and without."""
    result = Table(title="held-out problems answered exactly")
    for column in ("", "before", "after"):
        result.add_column(column, justify="left" if not column else "right")
    for label, name in (("with the tool", WITH_TOOL), ("without it", WITHOUT_TOOL)):
        values = curve(metrics, name).values
        result.add_row(label, *(f"{value:.1%}" for value in (values[0], values[-1])) if values else ("-", "-"))
    return result


def time_table(metrics: list[tuple[int, dict[str, float]]]) -> Table:
    """Seconds by phase, over the whole run."""
    result = Table("phase", "seconds", title="where the time of the steps went")
    for phase, name in PHASES.items():
        result.add_row(phase, f"{sum(curve(metrics, name).values):.0f}")
    return result


def main(run: Annotated[Path, typer.Argument(help="The run's folder.")]) -> None:
    """Report on a run. Exits with 1 if the last validation is below 95%."""
    metrics = read_metrics(run)
    draw(metrics, run / "learning_curve.png")
    console = Console()
    console.print(table(metrics), time_table(metrics))
    console.print(
        f"curve: {run}/learning_curve.png    trajectories: {run}/trajectories/\n"
        f"talk to it: python -m eval_service.app --from_run {run}"
    )
    if curve(metrics, WITH_TOOL).values[-1] < 0.95:
        console.print("[red]the success with the tool is below 95%[/]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
