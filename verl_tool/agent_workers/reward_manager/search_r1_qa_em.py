"""`reward.reward_manager.name=search_r1_qa_em`: grade answers of search questions, as in Search-R1 (arXiv 2503.09516).

The last ``<answer>…</answer>`` of the model's text must equal one of the golden answers after SQuAD's normalisation:
lower case, no punctuation, no articles, single spaces. Score: `right` (1), `wrong` (0), or `no_answer` (0). As in
verl's `search_r1_like_qa_em`, a right answer gets a quarter of the score if there are more than ten ``<answer>`` tags;
``published=False`` disables that.

``reward_kwargs.turn_rewards={}`` also rewards turns (`SearchTurns`), for ``algorithm.adv_estimator=mt_grpo``.
"""

from __future__ import annotations

import json
import re
import string
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager.base import GradingRewardManager, ScoreOptions
from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.grading.answers import last_tagged
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.agent_workers.reward_manager.grading.search_turns import SearchTurns, search_turn_rewards

_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]+")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
VERDICTS = frozenset({"yes", "no", "noanswer"})
"""Answers that are right or wrong as a whole, and that any text may contain."""
MAX_ANSWER_TAGS = 10


class SearchOptions(ScoreOptions):
    no_answer: float = 0.0
    turn_rewards: SearchTurns | None = None
    """How turns are rewarded in addition to the answer. By default they are not."""


class SearchR1Options(SearchOptions):
    published: bool = True
    """Whether a right answer among more than `MAX_ANSWER_TAGS` tags scores a quarter."""


class SearchRewardManager(GradingRewardManager[SearchOptions]):
    """Compares an answer in tags with golden answers, and can reward the searches."""

    Options = SearchOptions

    @property
    def by_turns(self) -> bool:
        return self.options.turn_rewards is not None

    @property
    def turn_weight(self) -> float:
        return 0.0 if self.options.turn_rewards is None else self.options.turn_rewards.weight

    async def grade(self, sample: Sample) -> Grade:
        """Grade the answer. Raises ValueError if the row has no golden answer."""
        golden = golden_answers(sample.ground_truth)
        grade = self.grade_answer(last_tagged(sample.text, "answer"), golden)
        if grade.correct and self._repeats_answers(sample.text):
            grade = replace(grade, score=grade.score / 4)
        if self.options.turn_rewards is None:
            return grade
        turns = search_turn_rewards(
            sample.trajectory.turn_calls, lambda text: mentions(text, golden), self.options.turn_rewards
        )
        return replace(grade, turn_rewards=turns)

    def _repeats_answers(self, text: str) -> bool:
        return False

    @abstractmethod
    def grade_answer(self, answer: str | None, golden: Sequence[str]) -> Grade:
        """Of the last answer, None if there is none."""


@register("search_r1_qa_em")
class SearchR1RewardManager(SearchRewardManager):
    """Compares normalised answers by exact match."""

    Options = SearchR1Options
    details = ("answered",)

    def _repeats_answers(self, text: str) -> bool:
        published = isinstance(self.options, SearchR1Options) and self.options.published
        return published and max(map(text.count, ("<answer>", "</answer>"))) > MAX_ANSWER_TAGS

    def grade_answer(self, answer: str | None, golden: Sequence[str]) -> Grade:
        if answer is None:
            return Grade(self.options.no_answer, False, {"answered": 0.0})
        right = any(same_answer(answer, gold) for gold in golden)
        return Grade(self.options.score(right), right, {"answered": 1.0})


def mentions(text: str, golden: Sequence[str]) -> bool:
    """Return whether `text` contains a golden answer as whole words, after normalisation.

    Golden answers that are yes, no, or empty after normalisation are ignored.
    """
    words = f" {normalised(text)} "
    forms = map(normalised, golden)
    return any(form and form not in VERDICTS and f" {form} " in words for form in forms)


def same_answer(answer: str, gold: str) -> bool:
    """Return whether two answers are equal after normalisation. If that leaves nothing of the gold answer, as of "The
    A", compare the texts."""
    normal = normalised(gold)
    if normal:
        return normalised(answer) == normal
    return bool(answer.strip()) and answer.strip().casefold() == gold.strip().casefold()


def normalised(answer: str) -> str:
    """Normalise an answer as SQuAD's official evaluation script does (Rajpurkar et al. 2016), but keep numbers intact;
    there, ``7.2`` and ``-72`` become 72."""
    numbers = _THOUSANDS.sub("", answer.lower())
    without = _ARTICLES.sub(" ", _PUNCTUATION.sub(_keep_number_marks, numbers))
    return " ".join(without.split())


def _keep_number_marks(marks: re.Match[str]) -> str:
    """Return those of the punctuation marks that belong to a number."""
    before, behind = marks.string[: marks.start()][-1:], marks.string[marks.end() :][:1]
    if not behind.isdigit():
        return ""
    if before.isdigit():
        return marks[0]
    return marks[0][-1] if marks[0][-1] in ".-" and not before.isalnum() else ""


def golden_answers(ground_truth: Any) -> list[str]:
    """Return the answers of a row: a list or its JSON text, one text, or Search-R1's ``{"target": …}``. Raises
    ValueError if there are none."""
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith(("[", "{")):
        ground_truth = json.loads(ground_truth)
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target")
    if isinstance(ground_truth, str):
        return [ground_truth]
    answers = [] if ground_truth is None else [str(answer) for answer in ground_truth]
    if not answers:
        raise ValueError("the row has no golden answer in its ground_truth")
    return answers
