"""A run's learning curve as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import matplotlib

from verl_tool.trainer.monitoring.run_metrics import Metrics, curve

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

REWARD = "critic/score/mean"
CALLS = "agent/tool_calls/mean"


def plot_metric(axes: Axes, metrics: Metrics, name: str, label: str | None = None, style: str = "-") -> None:
    """One metric against the step."""
    found = curve(metrics, name)
    axes.plot(found.steps, found.values, style, label=label)


def draw(metrics: Metrics, lines: Iterable[tuple[str, str, str]], path: Path, share: float | None = None) -> None:
    """Metrics (name, label, matplotlib's line style) against the step, tool calls below.

    With `share`, they are shares of problems, and this one is marked.
    """
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1))
    for name, label, style in lines:
        plot_metric(top, metrics, name, label, style)
    if share is None:
        top.set(ylabel="reward, score")
        top.legend()
    else:
        top.set(ylim=(0, 1.02), ylabel="share of problems")
        top.axhline(share, color="grey", linewidth=0.8, linestyle=":")
        top.legend(loc="center right")
    plot_metric(bottom, metrics, CALLS)
    bottom.set(xlabel="step", ylabel="tool calls")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
