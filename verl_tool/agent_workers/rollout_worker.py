"""Extend verl's agent-loop worker of the newer trainer: it marks validation rows for the loop, and reports what a
rollout raised. verl only marks the prompt as failed, and writes the reason to its log.

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

from typing import Any

import ray
import transfer_queue as tq

from verl_tool.agent_loop.row import VALIDATION
from verl_tool.platforms.patch import plain_class

RAISED = "raised"
"""Tag of a prompt in TransferQueue: what one of its rollouts raised, such as ``KeyError: 'answer'``."""
_MAX_CHARACTERS = 300


def make_rollout_worker(actor: Any) -> Any:
    """Extend verl's actor `AgentLoopWorkerTQ`, so that it sets the tag `RAISED` on prompts.

    The class is created in a function, so that Ray pickles all of it by value. It pickles verl's part by value in any
    case, and mixing by-value and by-name pickling yields two classes.
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
