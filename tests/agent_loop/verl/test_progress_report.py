"""Reports to a board, with Ray as it is."""

from __future__ import annotations

import asyncio

import pytest
import ray

from verl_tool.agent_loop.verl.progress_report import SECONDS_BETWEEN_REPORTS, ProgressReport
from verl_tool.trainer.progress.progress_board import Phase, PhaseState, find_board, make_board

pytestmark = [pytest.mark.alone, pytest.mark.slow]


@pytest.fixture
def cluster():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


async def test_nobody_is_told_where_no_ray_is():
    report = ProgressReport()
    report.add(3)
    await asyncio.sleep(SECONDS_BETWEEN_REPORTS * 1.5)
    assert not ray.is_initialized()


async def test_what_ended_reaches_the_board(cluster):
    board = make_board()
    await board.begin.remote(PhaseState(Phase.ROLLOUT, step=1, steps=2, expected=4))
    report = ProgressReport()
    for calls in (1, 2, 3):
        report.add(calls)
    await asyncio.sleep(SECONDS_BETWEEN_REPORTS * 1.5)
    report.add(4)
    await asyncio.sleep(SECONDS_BETWEEN_REPORTS * 1.5)
    now, ended = await board.read.remote(0)
    assert (now.done, now.calls, ended) == (4, 10, [])
    assert find_board() is not None


async def test_without_a_board_all_goes_on(cluster):
    report = ProgressReport()
    report.add(1)
    await asyncio.sleep(SECONDS_BETWEEN_REPORTS * 1.5)
    report.add(1)
    assert find_board() is None
