"""verl's worker of agent loops for its newer trainer, which also tells the loop that a row is a validation's, and what
ended a rollout.

verl's own marks the prompt as failed, and leaves the reason in its log. Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

from typing import Any

import ray
import transfer_queue as tq

from verl_tool.agent_loop.row import VALIDATION
from verl_tool.platforms.patch import plain_class

RAISED = "raised"
"""Tag of a prompt in TransferQueue: what a rollout of it raised, as ``KeyError: 'answer'``."""
_MAX_CHARACTERS = 300


def make_rollout_worker(actor: Any) -> Any:
    """verl's actor `AgentLoopWorkerTQ`, which puts `RAISED` to a prompt.

    Made in a function, so that Ray sends all of the class by value: of verl's it does so in any case, and a class of
    which one part goes by value and one by name is two.
    """

    class RolloutWorker(plain_class(actor)):  # type: ignore[misc]
        """Runs the agent loop and the grading of each sample of a prompt."""

        async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **row: Any) -> Any:
            if trajectory["validate"]:
                row[VALIDATION] = True
            try:
                return await super()._run_agent_loop(sampling_params, trajectory, **row)
            except Exception as error:
                words = f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS]
                partition = "val" if trajectory["validate"] else "train"
                await tq.async_kv_put(key=row["uid"], partition_id=partition, tag={RAISED: words})
                raise

    return ray.remote(RolloutWorker)
