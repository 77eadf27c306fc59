"""When a run ends because too much failed: of the trajectories, the calls, or the rewards."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from verl_tool.trainer.ppo.causes import GRADER, GRADER_BUG, Outcome, TooManyFaultsError, check_causes

MIN_CALLS = 20
"""Fewer calls are counted with those of the rollouts before."""
MAX_GRADER_BUGS = 5
"""Answers of a run at which the reward manager raised as it does at an empty one."""


@dataclass(frozen=True)
class FaultLimits:
    """Shares that may fail; 1 is no limit."""

    trajectories: float = 1.0
    calls: float = 1.0
    rewards: float = 1.0


class FaultWatch:
    """Checks each rollout of a run against `FaultLimits`."""

    def __init__(self, limits: FaultLimits) -> None:
        self._limits = limits
        self._recent: deque[tuple[int, Counter[str], str]] = deque()
        """Of the last rollouts with calls: their number, the kinds of their faults, and the words of one."""
        self._bugs = 0

    def check(self, outcomes: Sequence[Outcome], lost: int = 0) -> None:
        """Raises TooManyFaultsError that names the limit, the causes and the most frequent words."""
        check_causes(outcomes, self._limits.trajectories, lost)
        self._check_calls(outcomes)
        self._check_rewards(outcomes)

    def _check_calls(self, outcomes: Sequence[Outcome]) -> None:
        calls = [call for outcome in outcomes for call in outcome.trajectory.calls]
        if not calls:
            return
        faults = [call.fault for call in calls if call.fault is not None]
        words = Counter(fault.message for fault in faults).most_common(1)
        self._recent.append((len(calls), Counter(fault.kind.value for fault in faults), words[0][0] if words else ""))
        while sum(n for n, _, _ in self._recent) - self._recent[0][0] >= MIN_CALLS:
            self._recent.popleft()
        total = sum(n for n, _, _ in self._recent)
        kinds = sum((kinds for _, kinds, _ in self._recent), Counter[str]())
        if total < MIN_CALLS or kinds.total() <= self._limits.calls * total:
            return
        commonest = next((message for _, _, message in reversed(self._recent) if message), "unknown")
        raise TooManyFaultsError(
            f"{kinds.total()} of the last {total} calls of tools ended in a fault ({_listed(kinds)}), which is more "
            f"than max_call_fault_fraction={self._limits.calls}: what is left to train on are mostly trajectories "
            f"without calls. The most frequent: {commonest}. Look at the tool server's log and /health; raise "
            "max_call_fault_fraction to train on all the same"
        )

    def _check_rewards(self, outcomes: Sequence[Outcome]) -> None:
        if self._limits.rewards >= 1:
            return
        bugs = [outcome.message for outcome in outcomes if outcome.cause == GRADER_BUG]
        self._bugs += len(bugs)
        if bugs and self._bugs >= MAX_GRADER_BUGS:
            raise TooManyFaultsError(
                f"the reward manager raised at {self._bugs} answers as it does at an empty one ({GRADER_BUG}). The "
                f"most frequent: {_commonest(bugs)}. That is no failing infrastructure but a bug: it leaves just those "
                "answers out of the loss whose form it cannot read, so that nothing teaches the policy to write the "
                "right form. Let it give them the score of a wrong answer (python -m "
                "verl_tool.agent_workers.reward_manager.redteam finds them); max_reward_fault_fraction=1 trains on "
                "all the same"
            )
        graded = [outcome for outcome in outcomes if outcome.cause in (None, GRADER)]
        failed = [outcome.message for outcome in graded if outcome.cause == GRADER]
        if failed and len(failed) > self._limits.rewards * len(graded):
            raise TooManyFaultsError(
                f"{len(failed)} of {len(graded)} answers have no reward ({GRADER}), which is more than "
                f"max_reward_fault_fraction={self._limits.rewards}. The most frequent: {_commonest(failed)}. Look at "
                "the reward manager, its judge or its server; raise max_reward_fault_fraction to train on what is left"
            )


def _listed(kinds: Counter[str]) -> str:
    return ", ".join(f"{kind} {n}" for kind, n in kinds.most_common())


def _commonest(messages: Sequence[str]) -> str:
    return Counter(messages).most_common(1)[0][0]
