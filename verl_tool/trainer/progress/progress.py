"""What the trainer tells while it trains: to the watchdog that it is alive, to the board where it stands."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from verl_tool.trainer.monitoring.watchdog import Watchdog
from verl_tool.trainer.progress.progress_board import Phase, PhaseState, find_board

STARTED = "VERL_TOOL_STARTED"
"""Environment variable: when the command line began (seconds since the epoch)."""
SET_UP_SECONDS = "timing_s/setup"
SUCCESS, SUCCESS_METRIC = "success", "agent/success/mean"
"""A result of a rollout, and the name under which it is logged."""
VALIDATION_SECONDS = "timing_s/testing"
"""verl's own name; verl tells it of every validation but the one before the training."""


class Progress:
    """The phases of a training, one behind the other."""

    def __init__(self, stall_timeout: float) -> None:
        """Starts to watch: nothing told for `stall_timeout` seconds ends this process."""
        self._watchdog = Watchdog(stall_timeout)
        self._watchdog.start()
        self._doing = Phase.SET_UP.value
        self._board: Any | None = find_board()
        self._phase: Phase | None = Phase.SET_UP
        self._began = time.monotonic()
        self._results: dict[str, float] = {}
        self._metrics: dict[str, float] = {}

    def begin(self, phase: Phase, step: int, steps: int, expected: int = 0) -> None:
        """A phase of step `step` of `steps` begins, and the one before is over.

        It will bring `expected` trajectories.
        """
        self.end()
        self._doing = f"{phase.value} of step {step}"
        self.alive()
        self._phase, self._began, self._results = phase, time.monotonic(), {}
        self._board = self._board or find_board()
        if self._board is not None:
            self._board.begin.remote(PhaseState(phase, step, steps, expected))

    def alive(self) -> None:
        """A part of the phase is done."""
        self._watchdog.enter(self._doing)

    def expect(self, more: int) -> None:
        """The phase under way will bring more trajectories than it said. No sign of life to the watchdog."""
        if self._board is not None:
            self._board.expect.remote(more)

    def tell(self, results: Mapping[str, float]) -> None:
        """What came of the phase under way, by the name to show."""
        self._results.update(results)

    def end(self) -> None:
        """The phase under way is over, if there is one."""
        if self._phase is None:
            return
        seconds = time.monotonic() - self._began
        if self._phase is Phase.SET_UP:
            # Most of it was spent before this process was there.
            seconds = max(seconds, time.time() - float(os.environ.get(STARTED, "inf")))
            self._metrics[SET_UP_SECONDS] = seconds
        elif self._phase is Phase.VALIDATION:
            self._metrics[VALIDATION_SECONDS] = seconds
        elif self._phase is Phase.ROLLOUT and SUCCESS in self._results:
            self._metrics[SUCCESS_METRIC] = self._results[SUCCESS]
        self._phase = None
        if self._board is not None:
            self._board.end.remote(seconds, self._results)

    def take_metrics(self) -> dict[str, float]:
        """What phases that have ended tell and verl does not: seconds, success. Nothing a second time."""
        metrics, self._metrics = self._metrics, {}
        return metrics
