"""The actor's process where others sample (``trainer.v1.trainer_mode=separate_async``).

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

from verl.experimental.separation.engine_workers import DetachActorWorker

from verl_tool.agent_workers.fsdp_workers import AgentActorRolloutRefWorker


class AgentDetachActorWorker(AgentActorRolloutRefWorker, DetachActorWorker):
    """Ours, with verl's memory of the weights that sampled, which its log-probs are computed by."""
