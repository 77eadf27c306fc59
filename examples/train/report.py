"""What came of a run: `python examples/train/report.py outputs/acecoder/cpu`.

Draws `learning_curve.png` and prints the first and the last value of the metrics that tell whether it learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eval_service.model.checkpoint import how_to_serve
from verl_tool.trainer.monitoring.run_metrics import Metrics, curve, read_metrics
from verl_tool.trainer.progress.learning_curve import CALLS, REWARD, draw

VALIDATION = "val-core/"
OTHERS = ("agent/faulted", "training/rollout_probs_diff_max", "timing_s/step")


def names_of_interest(metrics: Metrics) -> list[str]:
    """The reward, then each validation's score, then the calls and what should stay small."""
    told = sorted({name for _, data in metrics for name in data})
    return [REWARD, *(name for name in told if name.startswith(VALIDATION)), CALLS, *OTHERS]


def lines_of(metrics: Metrics) -> list[tuple[str, str, str]]:
    """Reward and validation, as `draw` takes them."""
    scores = [name for name in names_of_interest(metrics) if name.startswith(VALIDATION)]
    return [(REWARD, REWARD, "-"), *((name, name, "o--") for name in scores)]


def table(metrics: Metrics) -> Table:
    """First and last value of each metric of interest."""
    result = Table("metric", "first", "last")
    for name in names_of_interest(metrics):
        values = curve(metrics, name).values
        if values:
            result.add_row(name, f"{values[0]:.3g}", f"{values[-1]:.3g}")
    return result


def main(run: Annotated[Path, typer.Argument(help="The run's folder.")]) -> None:
    """Report on a run."""
    metrics = read_metrics(run)
    draw(metrics, lines_of(metrics), run / "learning_curve.png")
    console = Console()
    console.print(table(metrics))
    console.print(
        f"curve: {run}/learning_curve.png    trajectories: {run}/trajectories/\n{how_to_serve(run)}",
        # Commands are copied: a line break would be copied with them.
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(main)
