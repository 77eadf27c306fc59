"""`reward.reward_manager.name=acecoder`: run the last code block against hidden tests, as in AceCoder (2502.01718).

Score: `right` (1) if all tests pass, else `wrong` (-1). With `binary=False`, the share of tests that pass, 0 to 1, as
in AceCoder's reward for RL. With ``published=False``, that share is scaled to the range from `wrong` to `right`.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager.base import GradingRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.grading.code_grader import DETAILS, CodeGrader, CodeOptions, server_url
from verl_tool.agent_workers.reward_manager.grading.sample import Sample


@register("acecoder")
class AceCoderRewardManager(GradingRewardManager[CodeOptions]):
    """Runs assert-style and stdin tests in the tool server's sandbox. The options are in `code_grader`."""

    Options = CodeOptions
    details = DETAILS
    keeps_deadlines = True

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._grader = CodeGrader(self.options, server_url(self.options, config))

    async def grade(self, sample: Sample) -> Grade:
        return await self._grader.grade(sample)
