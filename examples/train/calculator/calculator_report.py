"""What came of a run: `python examples/train/calculator/calculator_report.py outputs/calculator/grpo`.

Draws `learning_curve.png` and prints the success before and after, with and without the tool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eval_service.model.checkpoint import how_to_serve
from verl_tool.trainer.monitoring.run_metrics import Metrics, curve, read_metrics
from verl_tool.trainer.progress.learning_curve import REWARD, draw

WITH_TOOL = "val-core/calculator/acc/mean@1"
WITHOUT_TOOL = "val-core/calculator_without_tool/acc/mean@1"
WANTED = 0.95
LINES = (
    (REWARD, "reward, sampled (training problems)", "-"),
    (WITH_TOOL, "success with the tool (held-out problems)", "o-"),
    (WITHOUT_TOOL, "success without the tool (held-out problems)", "s--"),
)


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
    draw(metrics, LINES, run / "learning_curve.png", WANTED)
    console = Console()
    console.print(table(metrics))
    console.print(
        f"curve:        {run}/learning_curve.png\n"
        f"trajectories: {run}/trajectories/\n"
        f"{how_to_serve(run, run / 'data/test.parquet')}",
        # Commands are copied: a line break would be copied with them.
        soft_wrap=True,
    )
    if curve(metrics, WITH_TOOL).values[-1] < WANTED:
        console.print("[red]the success with the tool is below 95%[/]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
