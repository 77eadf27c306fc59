"""`reward.reward_manager.name=environment`: use the verdict of the environment in which the trajectory took place.

The row names its environment in ``tools_kwargs.environment`` (`verl_tool.environments`), which judges the trajectory at
its end. Score: its reward, any finite number; with `rewards=steps`, the sum of the rewards of its steps.
A trajectory whose own action caused a fault gets `fault_reward`, one that did not end its episode
`unfinished_reward`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_loop.trajectory import StopReason, Trajectory
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager, RewardOptions
from verl_tool.agent_workers.reward_manager.grade import Grade, GraderFault
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.verification import Verdict


class EnvironmentOptions(RewardOptions):
    rewards: Literal["verdict", "steps"] = "verdict"
    """``steps`` leaves out what the environment says at the end."""
    scale: float = 1.0
    """Factor of the reward."""
    right_from: float = 1.0
    """Minimum reward, before `scale`, at which a trajectory counts as right."""
    fault_reward: float = 0.0
    unfinished_reward: float | None = None
    """Reward of an episode that a limit ended, such as ``max_turns``, or that the model left before its end; None: the
    environment's verdict. Where losing gives less than 0, a policy learns to play on rather than to lose unless this is
    as low."""
    turn_rewards: bool = False
    """Whether each step's reward is also that of its turn, for estimators that take them (``mt_grpo``)."""
    turn_weight: float = Field(0.0, ge=0)
    """Weight of the sum of turn rewards in the score, in addition to the verdict."""


@register("environment")
class EnvironmentRewardManager(GradingRewardManager[EnvironmentOptions]):
    """Returns the environment's reward."""

    Options = EnvironmentOptions
    options: EnvironmentOptions
    details = ("verdict", "verdict_seconds", "env_steps", "env_invalid_steps", "env_done")

    @property
    def by_turns(self) -> bool:
        return self.options.turn_rewards

    @property
    def turn_weight(self) -> float:
        return self.options.turn_weight

    async def grade(self, sample: Sample) -> Grade:
        """Return the verdict as a grade. Raises GraderFault if there is none for a reason other than the trajectory."""
        trajectory, options = sample.trajectory, self.options
        turns = tuple((call.reward or 0.0) * options.scale for call in trajectory.turn_calls) if self.by_turns else ()
        verdict = trajectory.verdict
        if trajectory.fault is not None:  # caused by the trajectory's own action: `run_single` excludes all others
            return Grade(options.fault_reward, False, turn_rewards=turns)
        if verdict is None:
            words = "its row needs tools_kwargs.environment, and verl-tool's agent loop"
            raise GraderFault(f"no environment judged the trajectory: {words}")
        reward = verdict.score
        if reward is None:
            why = verdict.fault and f"{verdict.fault.kind.value}: {verdict.fault.message}"
            raise GraderFault(f"the environment gave no verdict: {why}")
        if verdict.reward is None:  # judging failed by what the model wrote
            return Grade(options.fault_reward, False, turn_rewards=turns)
        counts = {name: verdict.numbers[name] for name in self.details[2:] if name in verdict.numbers}
        details = {"verdict": reward, "verdict_seconds": verdict.seconds, **counts}
        if options.rewards == "steps":
            reward = sum(call.reward or 0.0 for call in trajectory.calls)
        if options.unfinished_reward is not None and _is_unfinished(trajectory, verdict):
            return Grade(options.unfinished_reward, False, details, turn_rewards=turns)
        return Grade(reward * options.scale, reward >= options.right_from, details, turn_rewards=turns)


def _is_unfinished(trajectory: Trajectory, verdict: Verdict) -> bool:
    """An environment that judges more than its steps' rewards judges an answer too. Records of earlier versions do not
    say how their episode ended."""
    numbers = verdict.numbers
    is_judged_answer = trajectory.stop is StopReason.ANSWERED and numbers.get("env_judged") == 1.0
    return numbers.get("env_done") == 0.0 and not is_judged_answer
