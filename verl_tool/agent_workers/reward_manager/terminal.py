"""`reward.reward_manager.name=terminal`: what the row's verifier said of the workspace that the trajectory left.

The row's ``reward_model`` has the style ``workspace_verifier`` (`verl_tool.verification`); the agent loop has the
verifier run at the trajectory's end and keeps what it said. Score: the verifier's reward, which is from 0 to 1; another
number counts as 0. A trajectory that its own call ended in a fault has 0.
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
    """The reward from which on a trajectory counts as right."""


@register("terminal")
class TerminalRewardManager(GradingRewardManager[TerminalOptions]):
    """Takes a verifier's word."""

    Options = TerminalOptions
    details = ("verified", "verify_seconds")

    async def grade(self, sample: Sample) -> Grade:
        """Raises GraderFault if nothing was verified, by no fault of the trajectory's."""
        verdict, fault = sample.trajectory.verdict, sample.trajectory.fault
        if fault is not None:  # its own call brought that about: `run_single` leaves out the others
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
