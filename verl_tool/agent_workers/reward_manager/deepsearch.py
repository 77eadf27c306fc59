r"""`reward.reward_manager.name=deepsearch`: grade answers of research questions with a judge model.

The answer is the last ``<answer>…</answer>`` or ``\boxed{…}`` in the model's text. It is right if it equals a golden
answer, compared as by `search_r1_qa_em`. Otherwise, a judge model at an OpenAI-compatible endpoint decides whether it
says the same. Score: `right` (1), `wrong` (0), or `no_answer` (0).

If the judge fails, the trajectory has a fault and no score. If the judge gives no verdict on this answer but does on a
reference answer, then the answer caused it and is wrong.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import Field
from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.grading.answers import last_boxed, last_tagged
from verl_tool.agent_workers.reward_manager.grading.judge_model import JudgeModel, Question, VerdictCache, one_line
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.agent_workers.reward_manager.search_r1_qa_em import SearchOptions, golden_answers, same_answer
from verl_tool.errors import ConfigError


class DeepSearchOptions(SearchOptions):
    """Options of the judge, and of grading."""

    judge_url: str | None = None
    """Base URL of the endpoint, such as ``http://127.0.0.1:8000/v1``. Required."""
    judge_model: str | None = None
    """Name of the model at the endpoint. Required."""
    judge_key_variable: str | None = None
    """Environment variable with the API key. The reward workers must have it."""
    judge_seconds: float = Field(60.0, gt=0)
    """Deadline for one verdict, including retries."""
    judge_max_tokens: int = Field(1024, ge=1)
    """Maximum length of one reply, including thoughts."""
    judge_at_a_time: int = Field(16, ge=1)
    """Maximum number of concurrent questions of one reward worker."""
    cache: Path | None = None
    """Folder of cached verdicts, shared by all reward workers. None disables the cache."""
    max_answer_chars: int = Field(500, ge=1)
    """A longer answer is wrong without being judged, since it could try to persuade the judge."""


@register("deepsearch")
class DeepSearchRewardManager(GradingRewardManager[DeepSearchOptions]):
    """Accepts golden answers, and answers that a judge finds equal to them."""

    Options = DeepSearchOptions
    details = ("answered", "judged")
    keeps_deadlines = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError if no judge is named, or its key is not in the environment."""
        super().__init__(*args, **kwargs)
        options = self.options
        if not options.judge_url or not options.judge_model:
            raise ConfigError("reward.reward_kwargs names no judge; set judge_url and judge_model")
        key = os.environ.get(options.judge_key_variable) if options.judge_key_variable else None
        if options.judge_key_variable and not key:
            raise ConfigError(
                f"reward.reward_kwargs.judge_key_variable={options.judge_key_variable} is not in the environment"
            )
        self._judge = JudgeModel(
            *(options.judge_url, options.judge_model, key, VerdictCache(options.cache)),
            seconds=options.judge_seconds,
            at_a_time=options.judge_at_a_time,
            max_tokens=options.judge_max_tokens,
        )

    async def grade(self, sample: Sample) -> Grade:
        """Grade the answer. Raises ValueError if the row has no golden answer, GraderFault if the judge fails."""
        golden = golden_answers(sample.ground_truth)
        answer = answer_in(sample.text)
        if answer is None:
            return Grade(self.options.no_answer, False, {"answered": 0.0, "judged": 0.0})
        right, judged = any(same_answer(answer, gold) for gold in golden), False
        if not right and 0 < len(answer) <= self.options.max_answer_chars and one_line(answer):
            question = Question(str(sample.extra_info.get("question") or ""), tuple(golden), one_line(answer))
            right, judged = await self._judge.is_correct(question), True
        return Grade(self.options.score(right), right, {"answered": 1.0, "judged": judged})

    async def close(self) -> None:
        await self._judge.close()


def answer_in(text: str) -> str | None:
    """Return the last answer in tags or in a box."""
    tagged, boxed = last_tagged(text, "answer"), last_boxed(text)
    if tagged is None or (boxed is not None and text.rfind("\\boxed{") > text.rfind("</answer>")):
        return boxed
    return tagged
