"""The soak of containers: what is a loss, and what is found afterwards."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from script_module import load_script

from verl_tool.errors import SandboxError, ToolFault
from verl_tool.protocol import FaultKind

SOAK = Path(__file__).parents[2] / "benchmarks/container_soak.py"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(SOAK.parent), *sys.path])
    return load_script("container_soak_script", SOAK)


class Counting:
    """Stands in for a container that counts, and fails at one call."""

    name = "c1"

    def __init__(self, fails_at: int = 0, error: Exception | None = None) -> None:
        self.calls, self.commands, self.cells, self.fails_at, self.error = 0, 0, 0, fails_at, error

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.fails_at and self.error is not None:
            raise self.error

    async def exec(self, line: str, wall_seconds: float) -> SimpleNamespace:
        self._count()
        self.commands += 1 + (self.calls == self.fails_at)
        stdout = f"n={self.commands} of={self.name}\n"
        return SimpleNamespace(exit_code=0, stdout=stdout, stderr="err\n", wall_seconds=0.0)

    async def run(self, code: str, wall_seconds: float) -> SimpleNamespace:
        self._count()
        self.cells += 1 + (self.calls == self.fails_at)
        return SimpleNamespace(exit_code=0, stdout=f"n={self.cells} of={self.name}\n", state="kept")


async def trajectory(soak: ModuleType, container: Counting, killed: str = "") -> tuple[object, int]:
    random.seed(1)
    its = soak.Soak(Path("unused"), hostile_every=10**9)
    one = soak.Trajectory(its, container)
    one.killed = killed
    return its, await one.live(20)


async def test_right_and_wrong_answers(soak: ModuleType) -> None:
    its, made = await trajectory(soak, Counting())
    assert (dict(its.seen), made, its.samples) == ({"right": 20}, 20, [])
    its, made = await trajectory(soak, Counting(fails_at=3))
    assert its.seen["a wrong answer"] > 0
    assert its.samples


async def test_a_fault_is_expected_only_after_a_kill(soak: ModuleType) -> None:
    lost = ToolFault(FaultKind.STATE_LOST, "it has ended", retryable=False)
    its, made = await trajectory(soak, Counting(5, lost), killed="podman kill")
    assert (its.seen["fault state_lost after podman kill"], made, its.samples) == (1, 5, [])
    its, _ = await trajectory(soak, Counting(5, lost))
    assert its.seen["a fault without a kill"] == 1
    its, _ = await trajectory(soak, Counting(5, SandboxError("no")))
    assert its.seen["a sandbox error without a kill"] == 1


def test_what_is_left_is_found_by_the_number_of_a_container(soak: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(f"verl-tool-1 {'ab' * 32}\nverl-tool-2\n")
    assert soak.engine_ids([log]) == {"ab" * 32}
    assert soak.remains_of({"ab" * 32}) == {"processes": [], "mounts": [], "control groups": []}
