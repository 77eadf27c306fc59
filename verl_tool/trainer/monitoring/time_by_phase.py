"""Sum up the time of a run by phase, from its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from verl_tool.trainer.monitoring.run_metrics import entries, metrics_files

PHASES: Mapping[str, tuple[str, ...]] = {
    "set-up": ("setup",),
    "rollout": ("gen",),
    "log-probs, values, advantages": ("reward", "old_log_prob", "ref", "values", "adv"),
    "update": ("update_critic", "update_actor"),
    "weight sync": ("update_weights",),
    "checkpoint": ("save_checkpoint",),
    "validation": ("testing",),
}
"""Names of verl's timers (``timing_s/NAME``, seconds) by phase."""
OTHER = "other"
"""Phase for the time of steps that no timer covers."""
_TIMER = "timing_s/"
_OUTSIDE_STEPS = ("set-up", "validation")


def time_by_phase(run: Path) -> dict[str, float]:
    """Return the seconds that a run spent in each phase, over all its starts. Phases without time are left out.

    Repeated steps count each time. Raises FileNotFoundError if there are no metrics.
    """
    timers: dict[str, float] = {}
    for path in metrics_files(run):
        for entry in entries(path):
            for name, value in entry["data"].items():
                if name.startswith(_TIMER):
                    timers[name] = timers.get(name, 0.0) + value
    seconds = {phase: sum(timers.get(_TIMER + name, 0.0) for name in names) for phase, names in PHASES.items()}
    inside = sum(value for phase, value in seconds.items() if phase not in _OUTSIDE_STEPS)
    seconds[OTHER] = max(0.0, timers.get(f"{_TIMER}step", 0.0) - inside)
    return {phase: value for phase, value in seconds.items() if value}


def phase_table(run: Path) -> Table:
    """Format `time_by_phase` as a table."""
    seconds = time_by_phase(run)
    whole = sum(seconds.values())
    table = Table("phase", "seconds", "share", title="time by phase")
    for column in table.columns[1:]:
        column.justify = "right"
    for phase, value in seconds.items():
        table.add_row(phase, f"{value:.1f}", f"{value / whole:.0%}")
    table.add_section()
    table.add_row("all", f"{whole:.1f}", "")
    return table
