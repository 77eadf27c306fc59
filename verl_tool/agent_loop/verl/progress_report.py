"""Tells a training's progress board which trajectories have ended."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

BOARD = "verl_tool_progress"
"""Name of the Ray actor that keeps the board (`verl_tool.trainer.progress.progress_board`)."""
SECONDS_BETWEEN_REPORTS = 0.3


class ProgressReport:
    """Counts what ended and tells the board now and then, not once a trajectory."""

    def __init__(self) -> None:
        self._board: Any | None = None
        self._trajectories = 0
        self._calls = 0
        self._waiting = False

    def add(self, calls: int) -> None:
        """A trajectory with so many calls has ended. To be called in the event loop."""
        self._trajectories += 1
        self._calls += calls
        if not self._waiting:
            self._waiting = True
            asyncio.get_running_loop().call_later(SECONDS_BETWEEN_REPORTS, self._report)

    def _report(self) -> None:
        if not ray.is_initialized():  # asking for an actor would start a cluster
            return
        if self._board is None:
            try:
                self._board = ray.get_actor(BOARD)
            except ValueError:  # nobody wants to know, now or later
                return
        self._board.count.remote(self._trajectories, self._calls)
        self._trajectories = self._calls = 0
        self._waiting = False
