"""A reward for random models: the share of letters in what was written. It differs from trajectory to trajectory."""

from __future__ import annotations

from verl_tool.agent_workers.reward_manager.base import GradingRewardManager, RewardOptions
from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.grading.sample import Sample


class LetterRewardManager(GradingRewardManager[RewardOptions]):
    """Gives the share of letters in the model's text, from 0 to 1."""

    Options = RewardOptions

    async def grade(self, sample: Sample) -> Grade:
        letters = sum(character.isalpha() for character in sample.text)
        score = letters / max(len(sample.text), 1)
        return Grade(score=score, correct=score > 0.5)
