"""What the benchmarks share: who goes when, and which ratio is told."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from script_module import load_script

pytestmark = pytest.mark.slow


@pytest.fixture
def load() -> ModuleType:
    return load_script("benchmark_load", Path(__file__).parents[2] / "benchmarks/load.py")


def scripted(load: ModuleType, system: str, speeds: list[float], order: list[str]) -> Callable[[], object]:
    """A measurement that finds these speeds, one a round."""
    left = list(speeds)

    async def one() -> object:
        order.append(system)
        speed = left.pop(0)
        return load.Cell(system, "print", 8, int(speed), 1, speed, 1.0, 2.0, 3.0, 1.0, 10.0)

    return one


async def test_a_round_s_ratio_is_to_the_baseline_of_the_same_round(load: ModuleType) -> None:
    """In the second round the machine is four times as fast, for both."""
    order: list[str] = []
    base, ours = (
        scripted(load, "base", [10, 40, 10], order),
        scripted(load, "ours", [50, 160, 60], order),
    )
    cells = await load.in_turn([base, ours], 3, "base")
    assert order == ["base", "ours", "ours", "base", "base", "ours"]
    assert [cell.system for cell in cells] == ["base", "ours"]
    assert cells[0].ratio == 1.0
    assert cells[1].ratios == (5.0, 4.0, 6.0)
    assert cells[1].ratio == 5.0
    assert (cells[1].per_second, cells[1].errors) == (60, 3)


async def test_the_table_tells_the_ratio_s_spread(load: ModuleType) -> None:
    cells = await load.in_turn([scripted(load, "base", [10, 10], []), scripted(load, "ours", [9, 11], [])], 2, "base")
    table = load.markdown(cells)
    assert "| print | 8 | base | 10 | 1.00x |" in table
    assert "| 1.00x (0.90-1.10) |" in table


def test_without_a_baseline_there_is_no_ratio(load: ModuleType) -> None:
    cell = load.Cell("ours", "print", 8, 9, 0, 9.0, 1.0, 2.0, 3.0, 1.0, 10.0)
    (told,) = load.with_ratios([cell], "base")
    assert told.ratio is None
    assert "| 9 |  |" in load.markdown([told])


def test_memory_is_that_of_a_process_and_all_that_descend_from_it(load: ModuleType) -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as shell:
        deadline = time.monotonic() + 10
        while len(load.family_of([shell.pid])) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        family = load.family_of([shell.pid])
        assert load.pids_by_namespace(family[1])[0] == family[1]
        assert load.memory_of_tree([shell.pid]) > load.memory_of_tree([family[1]]) > 0
        for pid in family:
            os.kill(pid, signal.SIGKILL)
    assert load.pids_by_namespace(shell.pid) == []
