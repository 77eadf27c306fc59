"""The simulation behind the figures: its clock, its engine, and that its bound is one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import ModuleType

import pytest
from script_module import load_script

from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory

SCRIPT = Path(__file__).parents[2] / "benchmarks/async_rollout.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("async_rollout", SCRIPT)


def run_simulated(benchmark: ModuleType, work: object) -> float:
    loop = benchmark.SimulatedLoop()
    try:
        loop.run_until_complete(work)
        return float(loop.time())
    finally:
        loop.close()


def test_simulated_time_passes_at_once(benchmark: ModuleType) -> None:
    began = time.perf_counter()

    async def sleepers() -> None:
        await asyncio.gather(*(asyncio.sleep(s) for s in (3600, 10, 7200)))

    assert run_simulated(benchmark, sleepers()) == pytest.approx(7200)
    assert time.perf_counter() - began < 60


def test_the_engine_decodes_at_the_speed_of_its_load(benchmark: ModuleType) -> None:
    async def two() -> None:
        engine = benchmark.Engine(gpus=1)
        await asyncio.gather(engine.decode(100), engine.decode(300))

    expected = 100 * benchmark.step_seconds(2, 1) + 200 * benchmark.step_seconds(1, 1)
    assert run_simulated(benchmark, two()) == pytest.approx(expected, rel=1e-3)


def test_sequences_beyond_the_slots_wait(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SEQUENCES_A_GPU", 1)

    async def three() -> None:
        engine = benchmark.Engine(gpus=1)
        await asyncio.gather(*(engine.decode(n) for n in (10, 20, 30)))

    assert run_simulated(benchmark, three()) == pytest.approx(60 * benchmark.step_seconds(1, 1), rel=1e-3)


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("workers", [4, 64])
def test_neither_way_beats_the_bound_and_lockstep_is_no_faster(benchmark: ModuleType, turns: int, workers: int) -> None:
    outcome = benchmark.compare("code", turns, seed=1, n=60, gpus=1, tool_workers=workers)
    assert outcome.bound_seconds <= outcome.async_seconds + 1e-6
    assert outcome.async_seconds <= outcome.lockstep_seconds + 1e-6


def test_work_that_was_not_done_is_noticed(benchmark: ModuleType) -> None:
    work = benchmark.draw_work(1, 1, "light", 0)
    did_one_token = Trajectory("0", (Segment(Author.PROMPT, (1,)), Segment(Author.MODEL, (1,))), StopReason.ANSWERED)
    with pytest.raises(RuntimeError, match="its work was"):
        benchmark.check([did_one_token], work)
