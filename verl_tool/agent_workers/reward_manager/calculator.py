"""`reward.reward_manager.name=calculator`: compare the number after ``Result=``, as in TRL's calculator experiment.

The answer is ``Result=10.1<submit>`` in the model's last turn. Score: `right` (1) or `wrong` (0).
"""

from __future__ import annotations

from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager.base import GradingRewardManager, ScoreOptions
from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.grading.answers import as_number
from verl_tool.agent_workers.reward_manager.grading.sample import Sample

_MARK = "Result="


@register("calculator")
class CalculatorRewardManager(GradingRewardManager[ScoreOptions]):
    """Compares decimals, digit for digit."""

    Options = ScoreOptions
    details = ("answered",)

    async def grade(self, sample: Sample) -> Grade:
        """Grade the number. Raises ValueError if the ground truth is not a number."""
        gold = as_number(str(sample.ground_truth))
        if gold is None:
            raise ValueError(f"ground_truth {sample.ground_truth!r} is not a number")
        _, mark, behind = sample.answer.rpartition(_MARK)
        number = as_number(behind.partition("<")[0]) if mark else None
        right = number is not None and number == gold
        return Grade(self.options.score(right), right, {"answered": number is not None})
