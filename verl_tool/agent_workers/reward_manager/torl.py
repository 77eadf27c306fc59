r"""`reward.reward_manager.name=torl`: grade mathematics with code, as in ToRL (arXiv 2503.23383).

math-verify compares the last ``\boxed{…}`` of the model's text with the ground truth. Score: `right` (1) or `wrong`
(-1). `code_error_penalty` (0; -0.5 in the paper's ablation) is added if a call ended in an error of the model's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field
from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager.base import GradingRewardManager, RewardOptions
from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.grading.answers import last_boxed, last_boxes
from verl_tool.agent_workers.reward_manager.grading.math_grader import MathGrader
from verl_tool.agent_workers.reward_manager.grading.math_text import form, spell
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.agent_workers.reward_manager.grading.shaping import error_rate

DETAILS = ("answered", "code_error")


class ComparisonOptions(RewardOptions):
    compare_seconds: float = Field(10.0, gt=0)
    """Deadline of one comparison, from when a process is free. After it, the answer is wrong."""
    compare_processes: int = Field(2, ge=1)
    """Maximum number of concurrent comparisons of one reward worker. Each process uses about 100 MB."""
    max_answer_chars: int = Field(1000, ge=1)
    """A longer answer is wrong unless it is the gold answer's text."""


class MathOptions(ComparisonOptions):
    right: float = 1.0
    wrong: float = -1.0
    code_error_penalty: float = Field(0.0, le=0)


class MathJudge:
    def __init__(self, options: MathOptions) -> None:
        self._options = options
        self._grader = MathGrader(options.compare_processes, min(options.compare_seconds, options.timeout_seconds))

    async def grade(self, sample: Sample) -> Grade:
        """Grade the last boxed answer. Raises GraderFault if the comparison fails."""
        return await self.grade_answer(sample, last_boxed(sample.text), last_boxes(sample.text))

    async def grade_answer(self, sample: Sample, answer: str | None, boxes: Sequence[str] = ()) -> Grade:
        """Grade `answer`. `boxes` are the contents of all boxes at the end. If the gold answer is a list, the boxes
        together may be the answer; otherwise each of them must be right."""
        options, gold = self._options, gold_answer(sample.ground_truth)
        right = await self._is_right(gold, answer)
        if not right and len(boxes) > 1:
            several = form(spell(gold)).kind != "value"
            right = await self._is_right(gold, ", ".join(boxes)) if several else await self._are_right(gold, boxes)
        failed = error_rate(sample) > 0
        score = (options.right if right else options.wrong) + (options.code_error_penalty if failed else 0.0)
        return Grade(score, right, {"answered": answer is not None, "code_error": failed})

    async def _are_right(self, gold: str, boxes: Sequence[str]) -> bool:
        for box in boxes:
            if not await self._is_right(gold, box):
                return False
        return True

    async def _is_right(self, gold: str, answer: str | None) -> bool:
        if not answer:
            return False
        if len(answer) > self._options.max_answer_chars:
            return answer.split() == gold.split()
        return await self._grader.equal(gold, answer)

    async def close(self) -> None:
        await self._grader.close()


@register("torl")
class ToRLRewardManager(GradingRewardManager[MathOptions]):
    """Compares boxed answers with math-verify."""

    Options: ClassVar[type[MathOptions]] = MathOptions
    details = DETAILS
    keeps_deadlines = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._judge = MathJudge(self.options)

    async def grade(self, sample: Sample) -> Grade:
        return await self._judge.grade(sample)


def gold_answer(ground_truth: Any) -> str:
    r"""Return the ground truth as LaTeX, without a ``\boxed`` around it."""
    text = str(ground_truth)
    boxed = last_boxed(text)
    return text if boxed is None else boxed
