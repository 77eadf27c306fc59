r"""`reward.reward_manager.name=mt_torl`: grade like `torl`, and reward each turn with a successful tool call.

The turn rewards split Multi-Turn-RL-Agent's code execution reward (arXiv 2505.11821) by turns. With `n` calls, each
successful one gets ``turn_share / n + turn_each``, any other 0. They add up to 0.3 times the share of successes plus
0.05 per success. At most `max_rewarded_turns` successes are rewarded, so that calls cannot pay more than an answer.

The score is that of the answer (`torl`) plus `turn_weight` times the sum of turn rewards. With 1, GRPO trains on what
the paper calls merged reward. With ``algorithm.adv_estimator=mt_grpo``, which gives each turn its own advantage, set
`turn_weight` to 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field
from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_loop.trajectory import CallRecord
from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.agent_workers.reward_manager.grading.shaping import failed
from verl_tool.agent_workers.reward_manager.torl import MathOptions, ToRLRewardManager


class TurnOptions(MathOptions):
    turn_share: float = Field(0.3, ge=0)
    """Reward if all calls succeed. Each successful call gets its part of it."""
    turn_each: float = Field(0.05, ge=0)
    """Additional reward of each successful call."""
    max_rewarded_turns: int = Field(8, ge=1)
    """Maximum number of successful calls that are rewarded."""
    turn_weight: float = Field(1.0, ge=0)
    """Weight of the sum of turn rewards in the score."""


@register("mt_torl")
class MTToRLRewardManager(ToRLRewardManager):
    """Grades boxed answers with math-verify, and rewards calls that succeeded."""

    Options = TurnOptions
    options: TurnOptions

    @property
    def by_turns(self) -> bool:
        return True

    @property
    def turn_weight(self) -> float:
        return self.options.turn_weight

    async def grade(self, sample: Sample) -> Grade:
        turns = turn_rewards(sample.trajectory.turn_calls, self.options)
        return replace(await super().grade(sample), turn_rewards=turns)


def turn_rewards(calls: Sequence[CallRecord], options: TurnOptions) -> tuple[float, ...]:
    """Return one reward per call, in order."""
    rewards, left = [], options.max_rewarded_turns
    for call in calls:
        good = call.valid and call.fault is None and not failed(call) and left > 0
        rewards.append(options.turn_share / len(calls) + options.turn_each if good else 0.0)
        left -= good
    return tuple(rewards)
