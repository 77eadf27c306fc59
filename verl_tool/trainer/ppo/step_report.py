"""Report a step's metrics to the console when they are logged. Written for verl 0.9.0 and 0.9.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_tool.platforms.patch import Patch, verl_patch
from verl_tool.trainer.monitoring.metric_limits import MetricWatch
from verl_tool.trainer.progress.progress_board import find_board
from verl_tool.trainer.progress.step_table import step_row


def _make_reporting(tracking: type[Any]) -> type[Any]:
    """Extend verl's `Tracking`, so that it checks the ranges of logged metrics and shows them on the console."""

    class ReportingTracking(tracking):
        def __init__(self, *args: Any, config: Mapping[str, Any], **kwargs: Any) -> None:
            super().__init__(*args, config=config, **kwargs)
            self._watch = MetricWatch(config["metric_limits"])
            self._asynchronous = config["trainer"]["v1"]["trainer_mode"] != "sync"
            self._board = find_board()

        def log(self, data: Mapping[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
            super().log(data, step, *args, **kwargs)
            reported = self._watch.check(data, step)
            row = step_row(data, step, asynchronous=self._asynchronous)
            if self._board is not None:
                self._board.tell.remote([*([row] if row else []), *reported])

    return ReportingTracking


def tracking_patch(module: str) -> Patch:
    """Return the patch of `Tracking` in verl's `module`."""
    why = "the training loop collects a step's metrics and passes them to this class only"
    return verl_patch(module, "Tracking", why, _make_reporting)
