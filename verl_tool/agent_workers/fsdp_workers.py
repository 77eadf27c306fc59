"""The process that holds the actor, its reference and the way to the engine. Written for verl 0.9.0."""

from __future__ import annotations

from typing import Any

import zmq
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_tool.agent_workers.segment_statistics import LossWithSegmentStatistics
from verl_tool.errors import VerlToolError


class WeightSyncError(VerlToolError):
    """The rollout engine did not take the new weights."""


class AgentActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's worker, which also tells how the model does on calls and on other text.

    Observations and trajectories that are left out are masked by ``response_mask`` already; a mini-batch of which
    nothing is left has loss 0.
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the model, and put the statistics around the actor's loss."""
        # verl's sender waits for the engine's answers on sockets of this context, and without a limit for ever.
        zmq.Context.instance().setsockopt(zmq.RCVTIMEO, int(self.config.weight_sync_timeout * 1000))
        super().init_model()
        if "actor" in self.role:
            self.set_loss_fn(LossWithSegmentStatistics(self.loss_fn))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Hand the weights to the engine. Raises WeightSyncError if it stops to answer."""
        try:
            return await super().update_weights(global_steps, mode)
        except zmq.Again:
            raise WeightSyncError(
                "the rollout engine took no weights within actor_rollout_ref.weight_sync_timeout="
                f"{self.config.weight_sync_timeout} s; it may be dead: look for its last error above"
            ) from None
