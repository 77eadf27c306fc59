"""The process that holds the actor, its reference and the way to the engine. Written for verl 0.9.0."""

from __future__ import annotations

from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_tool.agent_workers.segment_statistics import LossWithSegmentStatistics


class AgentActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's worker, which also tells how the model does on calls and on other text.

    Observations and trajectories that are left out are masked by ``response_mask`` already; a mini-batch of which
    nothing is left has loss 0.
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the model, and put the statistics around the actor's loss."""
        super().init_model()
        if "actor" in self.role:
            self.set_loss_fn(LossWithSegmentStatistics(self.loss_fn))
