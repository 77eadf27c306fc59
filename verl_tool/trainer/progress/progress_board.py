"""Where a training stands: written by the trainer and the rollout workers, read by the command that started it.

A Ray actor by the name `BOARD`, made by the command line. Without it nothing is reported. It knows nothing of torch or
verl: its process starts fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import ray

from verl_tool.agent_loop.verl.progress_report import BOARD
from verl_tool.trainer.progress.step_table import StepRow


class Phase(str, Enum):
    """What the trainer does."""

    SET_UP = "set-up"
    ROLLOUT = "rollout"
    UPDATE = "update"
    VALIDATION = "validation"


@dataclass(frozen=True)
class PhaseState:
    """A phase under way, or over."""

    phase: Phase = Phase.SET_UP
    step: int = 0
    steps: int = 0
    """All that the training will make."""
    expected: int = 0
    """Trajectories that the phase will bring; 0 if it brings none."""
    done: int = 0
    """Trajectories that have ended."""
    calls: int = 0
    """Calls of the trajectories that have ended."""
    seconds: float = 0.0
    """How long it took; 0 while it is under way."""
    results: Mapping[str, float] = field(default_factory=dict)
    """What came of it, by the name to show."""


Event = PhaseState | StepRow | str
"""A phase that ended, a step's numbers, or a warning."""


class ProgressBoard:
    """The phase under way, and what has happened, in order."""

    def __init__(self) -> None:
        self._now = PhaseState()
        self._events: list[Event] = []

    def begin(self, state: PhaseState) -> None:
        """A phase begins."""
        self._now = state

    def expect(self, more: int) -> None:
        """The phase under way will bring more trajectories than it said."""
        self._now = replace(self._now, expected=self._now.expected + more)

    def count(self, trajectories: int, calls: int) -> None:
        """Trajectories have ended. Told too late, behind the end of their phase, they count no more."""
        if self._now.expected:
            self._now = replace(self._now, done=self._now.done + trajectories, calls=self._now.calls + calls)

    def end(self, seconds: float, results: Mapping[str, float]) -> None:
        """The phase under way is over."""
        self._events.append(replace(self._now, seconds=seconds, results=dict(results)))

    def tell(self, events: Sequence[Event]) -> None:
        """Something has happened."""
        self._events += events

    def read(self, seen: int) -> tuple[PhaseState, list[Event]]:
        """The phase under way, and what happened behind the first `seen` events."""
        return self._now, self._events[seen:]


def make_board() -> Any:
    """Start the board. It lives as long as the handle."""
    return ray.remote(num_cpus=0)(ProgressBoard).options(name=BOARD).remote()


def find_board() -> Any | None:
    """The board of this training, if it has one."""
    try:
        return ray.get_actor(BOARD)
    except ValueError:
        return None
