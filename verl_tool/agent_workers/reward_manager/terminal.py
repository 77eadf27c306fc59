"""`reward.reward_manager.name=terminal`: use the verdict of the row's verifier on the trajectory's workspace.

The row's ``reward_model`` has the style ``workspace_verifier`` (`verl_tool.verification`). The agent loop runs the
verifier at the end of the trajectory and records the verdict. Score: the verifier's reward, from 0 to 1; any other
number counts as 0. A trajectory whose own call caused a fault gets 0.
"""

from __future__ import annotations

from pydantic import Field
from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager.base import GradingRewardManager, RewardOptions
from verl_tool.agent_workers.reward_manager.grade import Grade, GraderFault
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.verification import STYLE


class TerminalOptions(RewardOptions):
    right_from: float = Field(1.0, gt=0, le=1)
    """Minimum reward at which a trajectory counts as right."""


@register("terminal")
class TerminalRewardManager(GradingRewardManager[TerminalOptions]):
    """Returns the verifier's reward."""

    Options = TerminalOptions
    details = ("verified", "verify_seconds")

    async def grade(self, sample: Sample) -> Grade:
        """Return the verdict as a grade. Raises GraderFault if there is none for a reason other than the trajectory."""
        verdict, fault = sample.trajectory.verdict, sample.trajectory.fault
        if fault is not None:  # caused by the trajectory's own call: `run_single` excludes all others
            return Grade(0.0, False, {"verified": False})
        if verdict is None:
            words = f"its row needs reward_model.style={STYLE!r}, and verl-tool's agent loop"
            raise GraderFault(f"the trajectory was not verified: {words}")
        score = verdict.score
        if score is None:
            why = verdict.fault and f"{verdict.fault.kind.value}: {verdict.fault.message}"
            raise GraderFault(f"the verifier was not run: {why}")
        details = {"verified": verdict.counts, "verify_seconds": verdict.seconds}
        return Grade(score, score >= self.options.right_from, details)
