r"""`reward.reward_manager.name=pixel_reasoner`: grade questions about images, as in Pixel Reasoner (arXiv 2505.15966).

math-verify compares the last ``\boxed{…}`` of the model's text with the ground truth, or with any of a list. As in
verl-tool's `pixel_reasoner`, case is ignored, and ``\text``, "minutes" and "cm" are removed. The reward of trajectory y
in the group of prompt x, with n valid calls, is

    r(x, y) + α max(H - share(x), 0) 1[n > 0] + β min(N - n, 0)

where r is `right` (1) or `wrong` (0), and share(x) is the share of the group's trajectories with a valid call. The
middle term, curiosity, rewards a call while few trajectories of the group make one. The last term, redundancy,
penalises calls beyond N. The published values are the defaults: α is `curiosity` (0.5), H `min_share` (0.3), β
`redundancy` (0.05) and N `enough_calls` (1).

Since curiosity needs the whole group, the trainer adds it (`trainer.ppo.curiosity`), and only in training. Scores of a
validation do not include it.
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
    """Weight of the bonus for a valid call, which is multiplied by `min_share` minus the group's share."""
    min_share: float = Field(0.3, ge=0, le=1)
    """Share of the group's trajectories with a valid call from which on there is no bonus."""
    redundancy: float = Field(0.05, ge=0)
    """Penalty for each valid call beyond `enough_calls`."""
    enough_calls: int = Field(1, ge=0)


@register("pixel_reasoner")
class PixelReasonerRewardManager(GradingRewardManager[PixelReasonerOptions]):
    """Grades boxed answers with math-verify, with terms that reward calls and penalise too many."""

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
    r"""Yield the row's accepted answers, without a ``\boxed`` around them."""
    several = not isinstance(ground_truth, str) and hasattr(ground_truth, "__iter__")
    yield from map(gold_answer, ground_truth if several else [ground_truth])


def normalised(answer: str) -> str:
    return _UNIT.sub("", answer.replace("dfrac", "frac").replace(r"\varnothing", r"\emptyset")).strip()
