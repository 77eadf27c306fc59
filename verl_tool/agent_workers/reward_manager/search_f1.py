"""`reward.reward_manager.name=search_f1`: questions answered by search, graded by the words of the answer.

The last ``<answer>…</answer>`` of the model's own text against the golden answers, in SQuAD's F1 (Rajpurkar et al.
2016) of the normal forms of `search_r1_qa_em`: the words that both have, against the words of each. Score: from `wrong`
(0) to `right` (1) by the best F1, or `no_answer` (0). ``acc`` is exact match. A yes or no has no part that is right, as
in HotpotQA's script. Turns are rewarded as by `search_r1_qa_em`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.search_r1_qa_em import (
    VERDICTS,
    SearchRewardManager,
    normalised,
    same_answer,
)


@register("search_f1")
class SearchF1RewardManager(SearchRewardManager):
    """Shares of words. A list that holds the right answer among others gets a share too."""

    details = ("answered", "f1")
    partial_credit = True

    def grade_answer(self, answer: str | None, golden: Sequence[str]) -> Grade:
        if answer is None:
            return Grade(self.options.no_answer, False, {"answered": 0.0, "f1": 0.0})
        right = any(same_answer(answer, gold) for gold in golden)
        share = 1.0 if right else max(f1(answer, gold) for gold in golden)
        score = self.options.wrong + (self.options.right - self.options.wrong) * share
        return Grade(score, right, {"answered": 1.0, "f1": share})


def f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of words, 0 to 1."""
    answer, gold = normalised(answer), normalised(gold)
    if answer != gold and (answer in VERDICTS or gold in VERDICTS):
        return 0.0
    words, golden = answer.split(), gold.split()
    common = sum((Counter(words) & Counter(golden)).values())
    return 2 * common / (len(words) + len(golden)) if common else 0.0
