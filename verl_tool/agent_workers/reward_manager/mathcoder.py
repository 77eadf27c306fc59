"""`reward.reward_manager.name=mathcoder`: grade mathematics and code in one training, by a row's ``ability``.

Rows with ``ability`` "code" are graded like `acecoder`, those with "math" like `torl`, with the options of both. Logged
values of the other kind are NaN.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager import torl
from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.grading import code_grader
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.errors import ConfigError


class MathCoderOptions(code_grader.CodeOptions, torl.MathOptions):
    """The options of both kinds."""


@register("mathcoder")
class MathCoderRewardManager(GradingRewardManager[MathCoderOptions]):
    """Grades code with tests, and mathematics by boxed answers."""

    Options = MathCoderOptions
    details = (*code_grader.DETAILS, *torl.DETAILS)
    keeps_deadlines = True

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._code = code_grader.CodeGrader(self.options, code_grader.server_url(self.options, config))
        self._math = torl.MathJudge(self.options)

    async def grade(self, sample: Sample) -> Grade:
        """Grade the row. Raises GraderFault if the grader of its kind fails, ConfigError if its kind is unknown."""
        if sample.ability == "code":
            return await self._code.grade(sample)
        if sample.ability == "math":
            return await self._math.grade(sample)
        raise ConfigError(f"a row of {sample.data_source!r} has ability {sample.ability!r}; known: code, math")
