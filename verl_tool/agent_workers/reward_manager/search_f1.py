"""`reward.reward_manager.name=search_f1`: grade answers of search questions by word overlap.

The last ``<answer>…</answer>`` of the model's text is compared with the golden answers by SQuAD's F1 (Rajpurkar et al.
2016), after the normalisation of `search_r1_qa_em`. The score goes from `wrong` (0) to `right` (1) with the best F1, or
is `no_answer` (0). ``acc`` is exact match. As in HotpotQA's script, a yes or no gets no partial credit. Turns are
rewarded as by `search_r1_qa_em`.
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
    """Gives a score by word overlap. A list that contains the right answer gets partial credit too."""

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
    """Return the harmonic mean of precision and recall of words, 0 to 1."""
    answer, gold = normalised(answer), normalised(gold)
    if answer != gold and (answer in VERDICTS or gold in VERDICTS):
        return 0.0
    words, golden = answer.split(), gold.split()
    common = sum((Counter(words) & Counter(golden)).values())
    return 2 * common / (len(words) + len(golden)) if common else 0.0
