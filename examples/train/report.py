"""What came of a run: `python examples/train/report.py outputs/acecoder/cpu`.

Draws `learning_curve.png` and prints the first and the last value of the metrics that tell whether it learned.
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

REWARD = "critic/score/mean"
CALLS = "agent/tool_calls/mean"
VALIDATION = "val-core/"
OTHERS = ("agent/faulted", "training/rollout_probs_diff_max", "timing_s/step")


def names_of_interest(metrics: Metrics) -> list[str]:
    """The reward, then each validation's score, then the calls and what should stay small."""
    told = sorted({name for _, data in metrics for name in data})
    return [REWARD, *(name for name in told if name.startswith(VALIDATION)), CALLS, *OTHERS]


def draw(metrics: Metrics, path: Path) -> None:
    """Reward and validation against the step, tool calls below."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1))
    for name in names_of_interest(metrics):
        if name == REWARD or name.startswith(VALIDATION):
            found = curve(metrics, name)
            top.plot(found.steps, found.values, "-" if name == REWARD else "o--", label=name)
    top.set(ylabel="reward, score")
    top.legend()
    calls = curve(metrics, CALLS)
    bottom.plot(calls.steps, calls.values)
    bottom.set(xlabel="step", ylabel="tool calls")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


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
    draw(metrics, run / "learning_curve.png")
    console = Console()
    console.print(table(metrics))
    console.print(
        f"curve: {run}/learning_curve.png    trajectories: {run}/trajectories/\n"
        f"evaluate it: bash eval_service/scripts/start_api_service.sh --from_run {run}"
    )


if __name__ == "__main__":
    typer.run(main)
