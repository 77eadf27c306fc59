"""What the benchmark of a training's memory counts, and what it makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from script_module import load_script

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory_growth.py"
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"], env={})
child.wait()
"""


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARK.parent))
        return load_script("memory_growth", BENCHMARK)


def sample(benchmark, step: int, **megabytes: float):
    return benchmark.Sample(step, step * 10.0, megabytes)


def test_a_child_that_was_given_no_environment_counts(benchmark):
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", PARENT]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | {benchmark.MARK: mark}, **pipes) as parent:
        assert parent.stdout.readline() == b"up\n"
        found = benchmark.processes(mark)
        parent.stdin.close()
    assert parent.pid in found
    assert any("sys.stdin.read()" in title for pid, title in found.items() if pid != parent.pid)
    assert not benchmark.processes(mark)


def test_roles_are_told_by_title(benchmark):
    assert benchmark.role_of("python -I -c from inside.forkserver import main") == "sandbox"
    assert benchmark.role_of("ray::AgentLoopWorker.generate") == "agent loop"
    assert benchmark.role_of("bash train.sh") == "others"


def test_growth_is_that_behind_the_first_quarter(benchmark):
    samples = [sample(benchmark, step, steady=100.0 + (step < 10) * step, growing=2.0 * step) for step in range(40)]
    assert benchmark.growth(samples, "steady", 40) == pytest.approx(0.0, abs=1e-9)
    assert benchmark.growth(samples, "growing", 40) == pytest.approx(2.0)
