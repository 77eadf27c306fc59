"""Combine trajectories with their grades: why they faulted, and which of them are left out."""

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
"""The engine aborted the request."""
GRADER = "grader"
"""The reward manager, its judge or its server failed, so that there is no reward."""
GRADER_BUG = "grader_bug"
"""The reward manager raised on this answer and on an empty one: it has a bug."""
GRADER_CRASHED = "grader_crashed"
"""The reward manager failed on this answer but not on an empty one, whose score it has."""
LOST = "lost"
"""The agent loop raised. verl's newer trainer continues without the trajectory, or with another prompt."""
CAUSES = (*(kind.value for kind in FaultKind), ABORTED, GRADER, GRADER_BUG, GRADER_CRASHED, LOST)

INVALID = (Excluded.FAULT, Excluded.ABORTED, Excluded.GRADER)
"""Exclusions of trajectories that say nothing about the policy."""
_MAX_REPLACED = 0.9
_REASONS_PROVOKABLE = (Excluded.OVERLONG, Excluded.VOID)
_PROVOKABLE = {*(kind.value for kind in FaultKind if kind.provokable), GRADER_CRASHED}


class TooManyFaultsError(VerlToolError):
    """Too many trajectories of a step ended in a fault to update with the rest."""


@dataclass(frozen=True)
class GradedTrajectory:
    """A trajectory with the results of its grading."""

    trajectory: Trajectory
    reward_fault: str = ""
    """Why there is no reward."""
    provoked: str = ""
    """How the answer crashed the grader."""
    reward_extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Further values from the reward manager (JSON values), such as ``acc`` and ``base_score``."""

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
        """Description of the failure; empty if nothing failed."""
        if self.trajectory.fault is not None:
            return self.trajectory.fault.message
        if self.trajectory.stop is StopReason.ABORTED:
            return "the engine aborted the request"
        return self.reward_fault or self.provoked

    @property
    def provokable(self) -> bool:
        """Whether a model could cause the exclusion or fault."""
        return self.trajectory.excluded in _REASONS_PROVOKABLE or self.cause in _PROVOKABLE

    def recorded(self, **extra: Any) -> Trajectory:
        """Return the trajectory with the grading, and the given values, in `Trajectory.extra`, for its record."""
        names = ("reward_fault", "provoked", "reward_extra_info")
        grading = {name: value for name in names if (value := getattr(self, name))}
        return replace(self.trajectory, extra={**self.trajectory.extra, **grading, **extra})


def with_grading(trajectory: Trajectory, reward: float | None, reward_fault: str, provoked: str) -> GradedTrajectory:
    """Return `trajectory` with its reward. It is excluded if there is none."""
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
    """Exclude trajectories that have nothing left to compare with. `groups` has the group of each.

    `sampled` is as for `singleton_rows`, or None if samples of a prompt are not compared with each other.
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
    """Raise TooManyFaultsError if more than the fraction `limit` of trajectories faulted, for any cause.

    `lost` is the number of trajectories that never arrived. The error lists the causes with their counts, and the most
    frequent message.
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
        f"max_fault_fraction={limit}. The most frequent: {commonest}. Check the tool server's log and /health, the "
        "engine's log or the reward manager; raise max_fault_fraction to train on what is left"
    )


def check_replaced(raised: Sequence[str], others: int, limit: float) -> None:
    """Raise TooManyFaultsError if more than the fraction `limit` of a step's prompts were replaced because of errors.

    `raised` are the error messages; `others` is the number of prompts that arrived or may still arrive. `limit` is
    capped at nine in ten.
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
