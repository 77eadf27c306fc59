r"""`reward.reward_manager.name=simple_tir`: grade mathematics with code, as in SimpleTIR (arXiv 2509.02479).

The answer is the last ``\boxed{…}`` or, in the last Python block, ``final_answer(…)`` with a number or a string. No
code is executed. The answer is compared as by `torl`, with its options. Score: `right` (1) or `wrong` (-1).

The other half of SimpleTIR, leaving trajectories with void turns out of the loss, is the loop's `mask_void_traj`.
"""

from __future__ import annotations

import re

from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.grading.answers import last_box_start, last_boxed, last_code_block
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.agent_workers.reward_manager.torl import ToRLRewardManager

_FINAL = re.compile(
    r"^[ \t]*final_answer\([ \t]*(?:(?P<raw>r?)(?P<quote>[\"'])(?P<text>[^\"'\n]{1,1000})(?P=quote)"
    r"|(?P<number>[-+]?[0-9][0-9.e+-]{0,100}))[ \t]*\)[ \t]*(?:#.*)?$",
    re.MULTILINE,
)


@register("simple_tir")
class SimpleTIRRewardManager(ToRLRewardManager):
    """Compares boxed answers and literals of ``final_answer`` with math-verify."""

    async def grade(self, sample: Sample) -> Grade:
        return await self._judge.grade_answer(sample, answer_in(sample))


def answer_in(sample: Sample) -> str | None:
    """Return the model's answer: boxed, or a literal that its last program passes to ``final_answer``."""
    final = _final_answer(last_code_block(sample.turns) or "")
    boxed = last_boxed(sample.text)
    if final is not None and (boxed is None or sample.text.rfind("final_answer(") > last_box_start(sample.text)):
        return final
    return boxed


def _final_answer(code: str) -> str | None:
    calls = list(_FINAL.finditer(code))
    if not calls:
        return None
    found = calls[-1]
    if found["number"] is not None:
        return str(found["number"])
    return str(found["text"] if found["raw"] else found["text"].replace("\\\\", "\\"))
