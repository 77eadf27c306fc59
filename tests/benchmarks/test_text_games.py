"""The benchmark of text games measures both sides with the same actions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from script_module import load_script

pytestmark = pytest.mark.slow
BENCHMARK = Path(__file__).parents[2] / "benchmarks/text_games.py"


async def test_a_game_is_measured_in_the_host_and_in_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARK.parent), *sys.path])
    benchmark = load_script("text_games_benchmark", BENCHMARK)
    game = benchmark.GAMES[0]
    assert game.peer is None
    assert benchmark.measure_package(sys.executable, game, 2, 3, 4) > 0
    rate, begin_ms, memory = await benchmark.measure_host(sys.executable, game, 2, 3, 4)
    assert rate > 0
    assert begin_ms > 0
    assert memory < 100
