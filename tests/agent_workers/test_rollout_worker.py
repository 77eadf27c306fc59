"""What the newer trainer's worker tells the loop."""

from __future__ import annotations

from typing import Any

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("transfer_queue")

from verl_tool.agent_loop.row import VALIDATION  # noqa: E402
from verl_tool.agent_workers.rollout_worker import make_rollout_worker  # noqa: E402
from verl_tool.platforms.patch import plain_class  # noqa: E402


@ray.remote
class Worker:
    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **row: Any) -> Any:
        return row


@pytest.mark.parametrize("validates", [True, False])
async def test_the_loop_is_told_that_a_row_is_of_a_validation(validates: bool) -> None:
    worker = plain_class(make_rollout_worker(Worker))()
    row = await worker._run_agent_loop({}, {"validate": validates}, uid="a")
    assert row == ({"uid": "a", VALIDATION: True} if validates else {"uid": "a"})
