r"""`reward.reward_manager.name=pixel_reasoner`: questions about images, as in Pixel Reasoner (arXiv 2505.15966).

The last ``\boxed{…}`` of the model's own text against the ground truth, or any of a list of them, by math-verify; as in
verl-tool's `pixel_reasoner`, upper and lower case are alike, and ``\text``, "minutes" and "cm" are left out. The reward
of trajectory y of the group of a prompt x is, with n the number of its valid calls,

    r(x, y) + α max(H - share(x), 0) 1[n > 0] + β min(N - n, 0)

where r is `right` (1) or `wrong` (0), and share(x) that of the group's trajectories with a valid call. The middle term,
curiosity, pays for a call as long as few of the group make one; the last one, redundancy, makes calls beyond N cost.
The published values are the defaults: α is `curiosity` (0.5), H `min_share` (0.3), β `redundancy` (0.05) and N
`enough_calls` (1).

A group is known when all of it is sampled, so the trainer adds curiosity (`trainer.ppo.curiosity`), which is told the
trajectory's part, and only in training. The score of a validation is without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field
from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager.base import CURIOSITY, MIN_SHARE, GradingRewardManager, ScoreOptions
from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.grading.answers import last_boxed
from verl_tool.agent_workers.reward_manager.grading.math_grader import MathGrader
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.agent_workers.reward_manager.torl import ComparisonOptions, gold_answer

_UNIT = re.compile(r"\\text\b|\b(?:minutes|cm)\b")


class PixelReasonerOptions(ComparisonOptions, ScoreOptions):
    curiosity: float = Field(0.5, ge=0)
    """For a valid call, times how far the group's share falls short of `min_share`. 0: none."""
    min_share: float = Field(0.3, ge=0, le=1)
    """Of a group's trajectories with a valid call, from which on none is paid for."""
    redundancy: float = Field(0.05, ge=0)
    """Taken off for each valid call beyond `enough_calls`. 0: none."""
    enough_calls: int = Field(1, ge=0)


@register("pixel_reasoner")
class PixelReasonerRewardManager(GradingRewardManager[PixelReasonerOptions]):
    """Boxed answers by math-verify, with terms for calls that are made, and for those that are too many."""

    Options = PixelReasonerOptions
    details = ("answered", "valid_calls", "redundancy", CURIOSITY, MIN_SHARE)
    keeps_deadlines = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.options
        self._grader = MathGrader(options.compare_processes, min(options.compare_seconds, options.timeout_seconds))

    async def grade(self, sample: Sample) -> Grade:
        options, answer = self.options, last_boxed(sample.text)
        right = False
        if answer and len(answer) <= options.max_answer_chars:
            right = await self._is_one_of(answer, sample.ground_truth)
        calls = sum(call.valid for call in sample.trajectory.calls)
        redundancy = options.redundancy * min(options.enough_calls - calls, 0)
        details = {
            "answered": answer is not None,
            "valid_calls": calls,
            "redundancy": redundancy,
            CURIOSITY: options.curiosity if calls else 0.0,
            MIN_SHARE: options.min_share,
        }
        return Grade(options.score(right) + redundancy, right, details)

    async def _is_one_of(self, answer: str, ground_truth: Any) -> bool:
        answer = normalised(answer)
        for gold in map(normalised, golden_answers(ground_truth)):
            for pair in dict.fromkeys(((gold, answer), (gold.lower(), answer.lower()))):
                if await self._grader.equal(*pair):
                    return True
        return False


def golden_answers(ground_truth: Any) -> Iterator[str]:
    r"""Those of a row, any of which is right, a ``\boxed`` around one taken off."""
    several = not isinstance(ground_truth, str) and hasattr(ground_truth, "__iter__")
    yield from map(gold_answer, ground_truth if several else [ground_truth])


def normalised(answer: str) -> str:
    return _UNIT.sub("", answer.replace("dfrac", "frac").replace(r"\varnothing", r"\emptyset")).strip()
