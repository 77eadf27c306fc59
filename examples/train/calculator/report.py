"""What came of a run: `python examples/train/calculator/report.py outputs/calculator/grpo`.

Draws `learning_curve.png` and prints the success before and after, with and without the tool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import matplotlib
import typer
from rich.console import Console
from rich.table import Table

from verl_tool.trainer.run_metrics import Metrics, curve, read_metrics

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TRAINED = "critic/score/mean"
WITH_TOOL = "val-core/calculator/acc/mean@1"
WITHOUT_TOOL = "val-core/calculator_without_tool/acc/mean@1"
CALLS = "agent/tool_calls/mean"


def draw(metrics: Metrics, path: Path) -> None:
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


def table(metrics: Metrics) -> Table:
    """Before and after, with the tool and without."""
    result = Table(title="held-out problems answered exactly")
    for column in ("", "before", "after"):
        result.add_column(column, justify="left" if not column else "right")
    for label, name in (("with the tool", WITH_TOOL), ("without it", WITHOUT_TOOL)):
        values = curve(metrics, name).values
        result.add_row(label, *(f"{value:.1%}" for value in (values[0], values[-1])) if values else ("-", "-"))
    return result


def main(run: Annotated[Path, typer.Argument(help="The run's folder.")]) -> None:
    """Report on a run. Exits with 1 if the last validation is below 95%."""
    metrics = read_metrics(run)
    draw(metrics, run / "learning_curve.png")
    console = Console()
    console.print(table(metrics))
    console.print(
        f"curve:        {run}/learning_curve.png\n"
        f"trajectories: {run}/trajectories/\n"
        f"serve it:     bash eval_service/scripts/start_api_service.sh --from_run {run}"
    )
    if curve(metrics, WITH_TOOL).values[-1] < 0.95:
        console.print("[red]the success with the tool is below 95%[/]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
