"""A run ends when calls or rewards fail, not only when trajectories do; each limit is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("verl")

from verl_tool.agent_loop.trajectory import (
    RAISES_ON_EMPTY,
    Author,
    CallRecord,
    Segment,
    StopReason,
    Trajectory,
)
from verl_tool.protocol import Fault, FaultKind
from verl_tool.trainer.faults.fault_limits import MAX_GRADER_BUGS, FaultLimits, FaultWatch
from verl_tool.trainer.ppo.graded_trajectories import GRADER_BUG, GradedTrajectory, TooManyFaultsError, with_grading

GONE = Fault(kind=FaultKind.UNREACHABLE, message="nobody listens", retryable=False)
SILENT = Trajectory("a", (Segment(Author.PROMPT, (1,)), Segment(Author.MODEL, (2,), (-0.1,), "7")), StopReason.ANSWERED)
"""A trajectory that never calls."""


def calling(calls: int, faults: int) -> GradedTrajectory:
    records = [CallRecord(i, "1+1", fault=GONE if i < faults else None) for i in range(calls)]
    return GradedTrajectory(replace(SILENT, calls=tuple(records)))


def graded(fault: str, trajectory: Trajectory = SILENT) -> GradedTrajectory:
    return with_grading(trajectory, 0.0, fault, "")


def test_a_dead_server_ends_a_run_of_mostly_trajectories_without_calls() -> None:
    outcomes = [calling(1, 1) for _ in range(30)] + [GradedTrajectory(SILENT)] * 70
    FaultWatch(FaultLimits(trajectories=0.5)).check(outcomes)
    with pytest.raises(
        TooManyFaultsError, match=r"30 of the last 30 calls .*unreachable 30.*max_call_fault_fraction=0"
    ):
        FaultWatch(FaultLimits(0.5, calls=0.5)).check(outcomes)


def test_few_calls_are_counted_over_steps() -> None:
    watch = FaultWatch(FaultLimits(calls=0.5))
    for _ in range(3):
        watch.check([calling(6, 6)])
    with pytest.raises(TooManyFaultsError, match="24 of the last 24 calls"):
        watch.check([calling(6, 6)])


def test_faults_of_long_ago_are_forgotten() -> None:
    watch = FaultWatch(FaultLimits(calls=0.5))
    for faults in (9, 0, 9, 0):
        watch.check([calling(15, faults)])


AWAY = "grader: the judge is away"


def test_rewards_that_do_not_come_end_the_run() -> None:
    outcomes = [graded(AWAY)] * 4 + [GradedTrajectory(SILENT)] * 16
    FaultWatch(FaultLimits(rewards=0.2)).check(outcomes)
    with pytest.raises(TooManyFaultsError, match=r"4 of the last 20 answers have no reward \(grader 4\).*is away"):
        FaultWatch(FaultLimits(rewards=0.1)).check(outcomes)


def test_one_lost_reward_of_a_small_validation_does_not_end_the_run() -> None:
    watch = FaultWatch(FaultLimits(rewards=0.1))
    watch.check([graded(AWAY)] + [GradedTrajectory(SILENT)] * 4)
    watch.check([GradedTrajectory(SILENT)] * 25)
    for _ in range(2):
        watch.check([graded(AWAY)] + [GradedTrajectory(SILENT)] * 7)
    with pytest.raises(TooManyFaultsError, match="3 of the last 24 answers"):
        watch.check([graded(AWAY)] + [GradedTrajectory(SILENT)] * 7)


def at_prompt(prompt: int) -> GradedTrajectory:
    trajectory = replace(SILENT, segments=(Segment(Author.PROMPT, (prompt,)), *SILENT.segments[1:]))
    return graded(f"grader: Mine: IndexError ({RAISES_ON_EMPTY})", trajectory)


def test_a_reward_manager_with_a_bug_ends_the_run_and_is_not_called_infrastructure() -> None:
    assert at_prompt(1).cause == GRADER_BUG
    others = [GradedTrajectory(SILENT)] * 99
    watch = FaultWatch(FaultLimits(rewards=0.1))
    for prompt in range(1, MAX_GRADER_BUGS):
        watch.check([at_prompt(prompt), *others])
    with pytest.raises(TooManyFaultsError, match=r"no failing infrastructure but a bug.*whose form it cannot read"):
        watch.check([at_prompt(MAX_GRADER_BUGS), *others])
    careless = FaultWatch(FaultLimits(rewards=1))
    for prompt in range(2 * MAX_GRADER_BUGS):
        careless.check([at_prompt(prompt), *others])


def test_one_row_that_the_manager_cannot_grade_does_not_end_the_run() -> None:
    watch = FaultWatch(FaultLimits(rewards=0.1))
    for _ in range(2 * MAX_GRADER_BUGS):
        watch.check([at_prompt(1)] * 8 + [GradedTrajectory(SILENT)] * 92)
    with pytest.raises(TooManyFaultsError, match=r"20 of the last 100 answers have no reward \(grader_bug 20\)"):
        watch.check([at_prompt(1)] * 20 + [GradedTrajectory(SILENT)] * 80)
