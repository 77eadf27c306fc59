"""The benchmark of containers: what counts as a right answer, its table and its aims."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from script_module import load_script

BENCHMARK = Path(__file__).parents[2] / "benchmarks/containers.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCHMARK.parent), *sys.path])
    return load_script("containers_benchmark", BENCHMARK)


def system_of(benchmark: ModuleType, name: str, forgets: bool = False) -> object:
    """A system of a dictionary for each container."""

    class Box(benchmark.Box):
        async def run(self, command: Sequence[str]) -> tuple[int | None, str]:
            return (0, "") if command == ("true",) else (0, benchmark.LINE_OUTPUT)

        async def run_cell(self, code: str) -> str:
            return f"{1 if forgets else self.cells}\n"

        async def close(self) -> None:
            closed.append(self)

    class Fake(benchmark.System):
        has_cells = True

        async def open(self) -> Box:
            return Box()

        async def close(self) -> None:
            pass

        def memory(self, boxes: Sequence[object]) -> int:
            return len(boxes) << 20

    closed: list[object] = []
    system = Fake(name)
    system.closed = closed
    return system


async def test_a_level_is_measured_and_ended(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SECONDS_TO_REST", 0.0)
    system = system_of(benchmark, "container")
    (row,) = await benchmark.measure_level([system], 3, 0.01, 2)
    assert (row.live, row.system, row.idle_mib, row.wrong) == (3, "container", 1.0, 0)
    assert row.cells_per_second > 0
    assert len(system.closed) == 3
    (forgetful,) = await benchmark.measure_level([system_of(benchmark, "session", forgets=True)], 1, 0.01, 1)
    assert forgetful.wrong > 0


async def test_the_table_and_the_aims(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SECONDS_TO_REST", 0.0)
    systems = [system_of(benchmark, name) for name in ("session", "container")]
    rows = await benchmark.measure_level(systems, 1, 0.01, 1)
    lines = benchmark.markdown(rows).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    facts = {"bare_run_ms": 500.0, "turns": {"container": {"late_to_early": 1.5}}}
    reached = benchmark.aims(rows, facts)
    assert [met for _, _, met in reached] == [True, True, False]
    assert benchmark.aims([], {}) == []


def test_processes_are_found_by_name(benchmark: ModuleType) -> None:
    assert benchmark.processes_named(["no-container-has-this-name"]) == []
