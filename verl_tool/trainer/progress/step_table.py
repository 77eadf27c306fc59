"""The few numbers of a training step that its console shows, a line a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

HEADING_EVERY = 20
"""Lines, so that a heading is always in sight."""
NOT_REPORTED = "-"


@dataclass(frozen=True)
class StepRow:
    """One step, by the columns' titles. What a step does not tell is left out."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Column:
    """What stands under a title."""

    title: str
    width: int
    form: str
    """Python's format of the value."""
    read: Callable[[Mapping[str, float]], float | None]
    """Of the step's metrics."""


def _metric(*names: str) -> Callable[[Mapping[str, float]], float | None]:
    """The sum of those that are told."""

    def read(metrics: Mapping[str, float]) -> float | None:
        description = [float(metrics[name]) for name in names if name in metrics]
        return sum(description) if description else None

    return read


def _valid_calls(metrics: Mapping[str, float]) -> float | None:
    """Share of the calls, over all tools, that were valid."""
    calls = {
        name.removesuffix("/calls"): value
        for name, value in metrics.items()
        if name.startswith("agent/tool/") and name.endswith("/calls")
    }
    total = sum(calls.values())
    return sum(metrics.get(f"{tool}/valid", 0.0) * count for tool, count in calls.items()) / total if total else None


COLUMNS = (
    Column("reward", 7, ".3f", _metric("critic/score/mean")),
    Column("success", 7, ".1%", _metric("agent/success/mean")),
    Column("calls", 5, ".2f", _metric("agent/tool_calls/mean")),
    Column("valid", 6, ".0%", _valid_calls),
    Column("faults", 6, ".1%", _metric("agent/faulted")),
    Column("tokens", 6, ".0f", _metric("response_length/mean")),
    Column("rollout", 8, ".1f", _metric("timing_s/gen")),
    Column("update", 7, ".1f", _metric("timing_s/update_critic", "timing_s/update_actor")),
    Column("sync", 6, ".1f", _metric("timing_s/update_weights")),
    Column("step s", 7, ".1f", _metric("timing_s/step")),
    Column("kl", 8, ".1e", _metric("actor/ppo_kl")),
    Column("entropy", 7, ".3f", _metric("actor/entropy")),
    Column("prob diff", 9, ".1e", _metric("training/rollout_probs_diff_mean")),
)
"""Seconds: rollout, update, sync and the whole step. `prob diff`: of a token's probability in engine and trainer."""
ASYNC_COLUMNS = (
    Column("age", 5, ".2f", _metric("training/off_policy/trajectory_staleness_worst/mean")),
    Column("oldest", 6, ".0f", _metric("training/off_policy/trajectory_staleness_worst/max")),
    Column("weight", 6, ".3f", _metric("rollout_corr/rollout_is_mean")),
    Column("cut", 6, ".1%", _metric("rollout_corr/rollout_is_ratio_fraction_high")),
    Column("ess", 5, ".0%", _metric("rollout_corr/rollout_is_eff_sample_size")),
)
"""Further ones of an asynchronous training. Updates of the weights since the first token of a trajectory was sampled;
importance weights of the tokens, the share of them that was truncated, and the effective share of the samples."""
_STEP_WIDTH = 9


def step_row(metrics: Mapping[str, float], step: int, *, asynchronous: bool = False) -> StepRow | None:
    """What to show of a step's metrics; None if they are not those of a training step."""
    if "timing_s/gen" not in metrics and "timing_s/step" not in metrics:
        return None
    columns = (*COLUMNS, *(ASYNC_COLUMNS if asynchronous else ()))
    read = ((column.title, column.read(metrics)) for column in columns)
    return StepRow(step, {title: value for title, value in read if value is not None and math.isfinite(value)})


class StepTable:
    """Rows as text, under a heading that comes again now and then."""

    def __init__(self) -> None:
        self._rows = 0

    def lines(self, row: StepRow, steps: int) -> list[str]:
        """The row, of a training of `steps`, behind the heading if it is due."""
        due, self._rows = self._rows % HEADING_EVERY == 0, self._rows + 1
        columns = (*COLUMNS, *(column for column in ASYNC_COLUMNS if column.title in row.values))
        return [*([heading(columns)] if due else []), _line(row, steps, columns)]


def heading(columns: Sequence[Column] = COLUMNS) -> str:
    """The titles, each over its column."""
    return "  ".join([f"{'step':>{_STEP_WIDTH}}", *(f"{column.title:>{column.width}}" for column in columns)])


def _line(row: StepRow, steps: int, columns: Sequence[Column]) -> str:
    cells = [f"{f'{row.step}/{steps}' if steps else row.step:>{_STEP_WIDTH}}"]
    for column in columns:
        value = row.values.get(column.title)
        cells.append(f"{NOT_REPORTED if value is None else format(value, column.form):>{column.width}}")
    return "  ".join(cells)
