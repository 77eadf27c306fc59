"""The result of grading a trajectory. ``python -m verl_tool.agent_workers.reward_manager.grade NAME --texts FILE``
grades texts from a file; see `grading.grade_command`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_tool.errors import VerlToolError


@dataclass(frozen=True)
class Grade:
    """The score of one answer, before shaping."""

    score: float
    correct: bool
    """Whether the answer is right: verl's ``acc``. Its mean is the accuracy of a validation."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Values for the logs, under the names that the manager declares."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of the model's turns, from the first on, if the manager rewards turns (`GradingRewardManager.by_turns`).
    Turns beyond them have no reward. The calls of these turns are `Trajectory.turn_calls`."""
    row_rewards: tuple[float, ...] = ()
    """Additional rewards of `Trajectory.rows`, if the manager rewards rows (`GradingRewardManager.by_rows`). Empty
    means 0 for each row."""


class GraderFault(VerlToolError):
    """The grader failed and not the answer: no server, a crash, or a timeout. The trajectory has no score."""


if __name__ == "__main__":  # run as a script, this module's classes differ from the imported ones
    import typer

    from verl_tool.agent_workers.reward_manager.grading.grade_command import main

    typer.run(main)
