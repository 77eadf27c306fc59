"""Why trajectories faulted, and which of them are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_tool.agent_loop.trajectory import RAISES_ON_EMPTY, Excluded, StopReason, Trajectory
from verl_tool.errors import VerlToolError
from verl_tool.protocol import FaultKind
from verl_tool.trainer.ppo.invalid import singleton_rows

ABORTED = "aborted"
"""The engine gave the request up."""
GRADER = "grader"
"""The reward manager, its judge or its server failed: no reward."""
GRADER_BUG = "grader_bug"
"""The reward manager raised at this answer and at an empty one: its bug, which leaves out what it cannot read."""
GRADER_CRASHED = "grader_crashed"
"""The reward manager failed at this answer only, which has the score of an empty one."""
LOST = "lost"
"""The agent loop raised: verl's newer trainer goes on without the trajectory, or with another prompt."""
CAUSES = (*(kind.value for kind in FaultKind), ABORTED, GRADER, GRADER_BUG, GRADER_CRASHED, LOST)

INVALID = (Excluded.FAULT, Excluded.ABORTED, Excluded.GRADER)
"""What tells nothing about the policy."""
_MAX_REPLACED = 0.9
_REASONS_PROVOKABLE = (Excluded.OVERLONG, Excluded.VOID)
_PROVOKABLE = {*(kind.value for kind in FaultKind if kind.provokable), GRADER_CRASHED}


class TooManyFaultsError(VerlToolError):
    """Most trajectories of a step ended in a fault: what is left is no basis for an update."""


@dataclass(frozen=True)
class GradedTrajectory:
    """A trajectory with what grading and its group said of it."""

    trajectory: Trajectory
    reward_fault: str = ""
    """Why there is no reward."""
    provoked: str = ""
    """How its answer broke the grader."""
    reward_extra_info: Mapping[str, Any] = field(default_factory=dict)
    """What else the reward manager told (JSON values), ``acc`` and ``base_score`` among it."""

    @property
    def cause(self) -> str | None:
        """One of `CAUSES`, or None if nothing failed."""
        if self.trajectory.fault is not None:
            return self.trajectory.fault.kind.value
        if self.trajectory.stop is StopReason.ABORTED:
            return ABORTED
        if self.reward_fault:
            return GRADER_BUG if RAISES_ON_EMPTY in self.reward_fault else GRADER
        return GRADER_CRASHED if self.provoked else None

    @property
    def message(self) -> str:
        """What failed, in words; empty if nothing did."""
        if self.trajectory.fault is not None:
            return self.trajectory.fault.message
        if self.trajectory.stop is StopReason.ABORTED:
            return "the engine gave the request up"
        return self.reward_fault or self.provoked

    @property
    def provokable(self) -> bool:
        """Whether a model could bring about that it is left out."""
        return self.trajectory.excluded in _REASONS_PROVOKABLE or self.cause in _PROVOKABLE

    def recorded(self, **extra: Any) -> Trajectory:
        """The trajectory as its record tells it."""
        names = ("reward_fault", "provoked", "reward_extra_info")
        description = {name: value for name in names if (value := getattr(self, name))}
        return replace(self.trajectory, extra={**self.trajectory.extra, **description, **extra})


def with_grading(trajectory: Trajectory, reward: float | None, reward_fault: str, provoked: str) -> GradedTrajectory:
    """`trajectory` with its reward, or left out if there is none."""
    if reward_fault and trajectory.excluded not in (Excluded.FAULT, Excluded.ABORTED):
        trajectory = replace(trajectory, excluded=Excluded.GRADER)
    return GradedTrajectory(
        trajectory.with_reward(None if trajectory.excluded in INVALID else reward), reward_fault, provoked
    )


def drop_singleton_groups(
    outcomes: Sequence[GradedTrajectory],
    groups: Sequence[Any],
    sampled: int | None,
    without_baseline: Collection[Any] = (),
) -> list[GradedTrajectory]:
    """Those that nothing is left to compare with are left out; `groups` has one entry each.

    `sampled` is as for `singleton_rows`, or None where samples of a prompt are not compared with one another.
    """
    valid = [o.trajectory.excluded not in INVALID for o in outcomes]
    singletons = [False] * len(outcomes) if sampled is None else singleton_rows(groups, valid, sampled)
    return [
        replace(o, trajectory=replace(o.trajectory, excluded=Excluded.SINGLETON))
        if alone or (counts and group in without_baseline)
        else o
        for o, alone, counts, group in zip(outcomes, singletons, valid, groups, strict=True)
    ]


def check_causes(outcomes: Sequence[GradedTrajectory], limit: float, lost: int = 0) -> None:
    """Raise TooManyFaultsError if more than the fraction `limit` of trajectories faulted, for whatever cause.

    `lost` trajectories did not come at all. The message counts the causes and quotes the most frequent words.
    """
    failed = [(o.cause, o.message) for o in outcomes if o.cause is not None]
    failed += [(LOST, "the agent loop raised; its traceback is in the log of its worker, printed above")] * lost
    total = len(outcomes) + lost
    if not failed or len(failed) <= limit * total:
        return
    causes = ", ".join(f"{cause} {n}" for cause, n in Counter(cause for cause, _ in failed).most_common())
    commonest = Counter(message for _, message in failed).most_common(1)[0][0]
    raise TooManyFaultsError(
        f"{len(failed)} of {total} trajectories ended in a fault ({causes}), which is more than "
        f"max_fault_fraction={limit}. The most frequent: {commonest}. Look at the tool server's log and /health, the "
        "engine's or at the reward manager; raise max_fault_fraction to train on what is left"
    )


def check_replaced(raised: Sequence[str], others: int, limit: float) -> None:
    """Raise TooManyFaultsError if more than the fraction `limit` of a step's prompts were replaced for errors.

    `raised` are the words of each; `others` came or may still come. Whatever `limit` is, not more than nine in ten are.
    """
    limit = min(limit, _MAX_REPLACED)
    total = len(raised) + others
    if len(raised) <= limit * total:
        return
    commonest = Counter(raised).most_common(1)[0][0]
    raise TooManyFaultsError(
        f"{len(raised)} of {total} prompts of a step had a rollout that raised ({LOST}) and were replaced, which is "
        f"more than the share {limit} (max_fault_fraction, and {_MAX_REPLACED} at most). The most frequent: "
        f"{commonest or 'unknown'}. Its traceback is in the log of the agent loop's worker, printed above"
    )
