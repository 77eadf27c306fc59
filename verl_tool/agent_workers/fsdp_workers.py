"""The worker of the actor, the reference model and the engine. Written for verl 0.9.0 and 0.9.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq
from peft import PeftConfig, PeftModel
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_tool.agent_workers import no_engine  # noqa: F401 - registers its name
from verl_tool.agent_workers.masked_loss import MaskedLossWorker
from verl_tool.agent_workers.merged_export import merge_adapter
from verl_tool.agent_workers.segment_statistics import LossWithSegmentStatistics
from verl_tool.errors import VerlToolError


class WeightSyncError(VerlToolError):
    """The rollout engine did not take the new weights."""


class AgentActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's worker, which also reports statistics of the model on calls and on other text.

    ``response_mask`` already masks observations and excluded trajectories.
    """

    actor_worker_cls = MaskedLossWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the model, and put the statistics around the actor's loss."""
        # verl's sender waits for the engine on sockets of this context, by default without a limit.
        for limit in (zmq.SNDTIMEO, zmq.RCVTIMEO):
            zmq.Context.instance().setsockopt(limit, int(self.config.weight_sync_timeout * 1000))
        super().init_model()
        if "actor" in self.role:
            self.set_loss_fn(LossWithSegmentStatistics(self.loss_fn))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Save as verl does, and merge the adapter, if there is one, into the copy in Hugging Face's format."""
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        adapter = self._adapter()
        if self.rank == 0 and adapter is not None and "hf_model" in self.config.actor.checkpoint.save_contents:
            trusted = bool(self.config.model.get("trust_remote_code", False))
            merge_adapter(Path(local_path) / "huggingface", adapter, trust_remote_code=trusted)

    def _adapter(self) -> PeftConfig | None:
        module = self.actor.engine.module
        # FSDP1 wraps the model; FSDP2 keeps its class.
        model = module.module if isinstance(module, FullyShardedDataParallel) else module
        return model.peft_config["default"] if isinstance(model, PeftModel) else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Send the weights to the engine. Raises WeightSyncError if the engine stops answering."""
        try:
            return await super().update_weights(global_steps, mode)
        except zmq.Again:
            raise WeightSyncError(
                "the rollout engine took no weights within actor_rollout_ref.weight_sync_timeout="
                f"{self.config.weight_sync_timeout} s; it may be dead: check its last error above"
            ) from None
