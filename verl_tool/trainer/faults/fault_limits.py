"""When a run ends because too much failed: of the trajectories, the calls, or the rewards."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from verl_tool.trainer.ppo.graded_trajectories import (
    GRADER,
    GRADER_BUG,
    GradedTrajectory,
    TooManyFaultsError,
    check_causes,
)

MIN_COUNT = 20
"""Fewer calls, or answers, are counted with those of the rollouts before."""
MAX_GRADER_BUGS = 5
"""Prompts of a run whose answers the reward manager raised at as it does at an empty one."""


@dataclass(frozen=True)
class FaultLimits:
    """Shares that may fail; 1 is no limit."""

    trajectories: float = 1.0
    calls: float = 1.0
    rewards: float = 1.0


class _RecentWindow:
    """The last rollouts that hold `MIN_COUNT` of what is counted: their numbers, and of what failed kinds and words."""

    def __init__(self) -> None:
        self._rollouts: deque[tuple[int, Counter[str], Counter[str]]] = deque()

    def add(self, count: int, failed: Sequence[tuple[str, str]]) -> None:
        """One more rollout; `failed` has a kind and words each."""
        if count:
            self._rollouts.append((count, Counter(kind for kind, _ in failed), Counter(words for _, words in failed)))
        while self._rollouts and self.total - self._rollouts[0][0] >= MIN_COUNT:
            self._rollouts.popleft()

    @property
    def total(self) -> int:
        return sum(count for count, _, _ in self._rollouts)

    @property
    def kinds(self) -> Counter[str]:
        return sum((kinds for _, kinds, _ in self._rollouts), Counter[str]())

    @property
    def commonest_message(self) -> str:
        """The most frequent words of the last rollout in which something failed."""
        return next((words.most_common(1)[0][0] for _, _, words in reversed(self._rollouts) if words), "unknown")

    def exceeds(self, share: float) -> bool:
        return self.total >= MIN_COUNT and self.kinds.total() > share * self.total


class FaultWatch:
    """Checks each rollout of a run against `FaultLimits`."""

    def __init__(self, limits: FaultLimits) -> None:
        self._limits = limits
        self._calls, self._answers = _RecentWindow(), _RecentWindow()
        self._bugs: set[int] = set()
        """Hashes of the prompts at whose answers the reward manager has a bug: a validation asks the same again."""

    def check(self, outcomes: Sequence[GradedTrajectory], lost: int = 0) -> None:
        """Raises TooManyFaultsError that names the limit, the causes and the most frequent words."""
        check_causes(outcomes, self._limits.trajectories, lost)
        self._check_calls(outcomes)
        self._check_rewards(outcomes)

    def _check_calls(self, outcomes: Sequence[GradedTrajectory]) -> None:
        calls = [call for outcome in outcomes for call in outcome.trajectory.calls]
        faults = [call.fault for call in calls if call.fault is not None]
        self._calls.add(len(calls), [(fault.kind.value, fault.message) for fault in faults])
        if not calls or not self._calls.exceeds(self._limits.calls):
            return
        kinds, total = self._calls.kinds, self._calls.total
        raise TooManyFaultsError(
            f"{kinds.total()} of the last {total} calls of tools ended in a fault ({_format_counts(kinds)}), which is "
            f"more than max_call_fault_fraction={self._limits.calls}: what is left to train on are mostly trajectories "
            f"without calls. The most frequent: {self._calls.commonest_message}. Look at the tool server's "
            "log and /health; raise max_call_fault_fraction to train on all the same"
        )

    def _check_rewards(self, outcomes: Sequence[GradedTrajectory]) -> None:
        if self._limits.rewards >= 1:
            return
        bugs = [outcome for outcome in outcomes if outcome.cause == GRADER_BUG]
        self._bugs |= {hash(tuple(outcome.trajectory.prompt_ids)) for outcome in bugs}
        if bugs and len(self._bugs) >= MAX_GRADER_BUGS:
            words = Counter(outcome.message for outcome in bugs).most_common(1)[0][0]
            raise TooManyFaultsError(
                f"the reward manager raised at answers to {len(self._bugs)} prompts as it does at an empty one "
                f"({GRADER_BUG}). The most frequent: {words}. That is no failing infrastructure but a bug: it leaves "
                "just those answers out of the loss whose form it cannot read, so that nothing teaches the policy to "
                "write the right form. Let it give them the score of a wrong answer (python -m "
                "verl_tool.agent_workers.reward_manager.redteam finds them); max_reward_fault_fraction=1 trains on "
                "all the same"
            )
        graded = [outcome for outcome in outcomes if outcome.cause in (None, GRADER, GRADER_BUG)]
        failed = [(str(outcome.cause), outcome.message) for outcome in graded if outcome.cause is not None]
        self._answers.add(len(graded), failed)
        if failed and self._answers.exceeds(self._limits.rewards):
            kinds, total = self._answers.kinds, self._answers.total
            raise TooManyFaultsError(
                f"{kinds.total()} of the last {total} answers have no reward ({_format_counts(kinds)}), which is "
                f"more than max_reward_fault_fraction={self._limits.rewards}. The most frequent: "
                f"{self._answers.commonest_message}. Look at the reward manager, its judge or its server; raise "
                "max_reward_fault_fraction to train on what is left"
            )


def _format_counts(kinds: Counter[str]) -> str:
    return ", ".join(f"{kind} {n}" for kind, n in kinds.most_common())
