"""The benchmark of the loop's own work: all loops have the same conversations."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from script_module import load_script

pytest.importorskip("verl")
pytest.importorskip("torchvision", reason="torchvision is not here: source scripts/env.sh train")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("agent_loop_overhead", Path(__file__).parents[2] / "benchmarks" / "agent_loop_overhead.py")


async def test_all_loops_have_the_same_conversations(benchmark: ModuleType) -> None:
    found = await benchmark.costs(trajectories=2, turns=1, concurrency=2, repeats=1)
    assert [cost.loop for cost in found] == list(benchmark.LOOPS)
    tokens = [cost.tokens for cost in found]
    assert max(tokens) - min(tokens) <= 1, "beside the turn's texts, one line break"


@pytest.mark.alone
async def test_an_image_a_turn_is_its_tokens_in_both_loops(benchmark: ModuleType) -> None:
    tokens = []
    with benchmark.seeing(256) as sight:
        for turns in (1, 2):
            ours, verls = await benchmark.costs(2, turns, 2, 1, sight)
            assert ours.tokens == verls.tokens
            tokens.append(ours.tokens)
    assert tokens[1] - tokens[0] > 64
