"""The actor's process where others sample (``trainer.v1.trainer_mode=separate_async``).

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register

from verl_tool.agent_workers.fsdp_workers import AgentActorRolloutRefWorker


class AgentDetachActorWorker(AgentActorRolloutRefWorker, DetachActorWorker):
    """Ours, with verl's memory of the weights that sampled, which its log-probs are computed by."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model_to_cpu(self, n: int) -> None:
        """Remember the weights under `n`."""
        super().save_model_to_cpu(n)
        if self.config.actor.strategy == "fsdp2":
            # Of weights that lie on the CPU verl remembers the very tensors, which the next update changes.
            shards, spec = self.cpu_saved_models[n]
            trained = {_storage(parameter) for parameter in self.actor.engine.module.parameters()}
            own = {
                name: (shard.clone() if _storage(shard) in trained else shard, placement)
                for name, (shard, placement) in shards.items()
            }
            self.cpu_saved_models[n] = own, spec


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
