r"""`reward.reward_manager.name=gsm8k`: compare the number after ``####``, or in ``\boxed{}``, with the ground truth.

With `flexible`, the last number of the model's text counts if it has neither. Score: `right` (1) or `wrong` (0).
"""

from __future__ import annotations

from decimal import Decimal

from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager.base import GradingRewardManager, ScoreOptions
from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.grading.answers import as_number, last_boxed, last_number
from verl_tool.agent_workers.reward_manager.grading.sample import Sample

_MARK = "####"


class Gsm8kOptions(ScoreOptions):
    flexible: bool = False


@register("gsm8k")
class Gsm8kRewardManager(GradingRewardManager[Gsm8kOptions]):
    """Compares numbers digit for digit, without a tolerance."""

    Options = Gsm8kOptions
    details = ("answered",)

    async def grade(self, sample: Sample) -> Grade:
        """Grade the number. Raises ValueError if the ground truth is not a number."""
        gold = as_number(str(sample.ground_truth).rpartition(_MARK)[2])
        if gold is None:
            raise ValueError(f"ground_truth {sample.ground_truth!r} is not a number")
        number = final_number(sample.text, self.options.flexible)
        right = number is not None and number == gold
        return Grade(self.options.score(right), right, {"answered": number is not None})


def final_number(text: str, flexible: bool) -> Decimal | None:
    """Return the number that the text gives as its answer."""
    _, mark, behind = text.rpartition(_MARK)
    if mark:
        line = behind.strip().partition("\n")[0]
        number, _, rest = line.partition(" ")
        # "72 dollars" is one answer, "72 or 73" are two.
        return None if any(character.isnumeric() for character in rest) else as_number(number)
    boxed = last_boxed(text)
    if boxed is not None:
        return as_number(boxed)
    return last_number(text) if flexible else None
