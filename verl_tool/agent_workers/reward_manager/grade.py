"""What grading a trajectory gives. ``python -m verl_tool.agent_workers.reward_manager.grade NAME --texts FILE`` grades
texts of one's own; see `grading.grade_command`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_tool.errors import VerlToolError


@dataclass(frozen=True)
class Grade:
    """The score of one answer, before shaping."""

    score: float
    correct: bool
    """Whether the answer counts as right: verl's ``acc``, the mean of which is the accuracy of a validation."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Values for the logs, under the names that the manager declares."""
    turn_rewards: tuple[float, ...] = ()
    """A reward for each turn of the model's from the first on, of managers that reward turns
    (`GradingRewardManager.by_turns`); later turns have none. `Trajectory.turn_calls` tells what they called."""
    row_rewards: tuple[float, ...] = ()
    """A further reward for each of `Trajectory.rows`, of managers that reward rows (`GradingRewardManager.by_rows`). An
    empty one is 0 for each."""


class GraderFault(VerlToolError):
    """The grader failed, not the answer: no server, a crash, no end in time. Such a trajectory has no score."""


if __name__ == "__main__":  # its own classes are under another name then
    import typer

    from verl_tool.agent_workers.reward_manager.grading.grade_command import main

    typer.run(main)
