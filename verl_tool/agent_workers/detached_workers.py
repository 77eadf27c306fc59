"""The actor's worker if separate processes sample (``trainer.v1.trainer_mode=separate_async``).

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register

from verl_tool.agent_workers.fsdp_workers import AgentActorRolloutRefWorker


class AgentDetachActorWorker(AgentActorRolloutRefWorker, DetachActorWorker):
    """verl-tool's worker that can also save the sampling weights, with which verl computes log-probabilities."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model_to_cpu(self, n: int) -> None:
        """Save the weights under the number `n`."""
        super().save_model_to_cpu(n)
        if self.config.actor.strategy == "fsdp2":
            # If the weights are on the CPU, verl saves references to tensors that the next update changes.
            shards, spec = self.cpu_saved_models[n]
            trained = {_storage(parameter) for parameter in self.actor.engine.module.parameters()}
            copies = {
                name: (shard.clone() if _storage(shard) in trained else shard, placement)
                for name, (shard, placement) in shards.items()
            }
            self.cpu_saved_models[n] = copies, spec


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
