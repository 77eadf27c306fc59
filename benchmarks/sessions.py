"""Sessions of the sandbox beside a bare `python -i` for each trajectory, which has no isolation and no limits.

    python benchmarks/sessions.py --live 8 --live 64 --json outputs/benchmarks/sessions.json

Both are measured in turn in one run: read the ratios. Memory is the proportional set size (PSS) of the processes, where
what sessions share with their forkserver counts once, divided by their number; the forkserver itself is counted in.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Protocol

import psutil
import typer
from rich.console import Console
from rich.table import Table

from verl_tool.sandbox import SandboxPool, Session, SessionLimits

CALLS = 10
"""Of each live trajectory."""
ANSWER_SECONDS = 60.0
FIRST = "import numpy as np\nx = 1"


class Interpreter(Protocol):
    """Python state of one trajectory."""

    async def first(self) -> None:
        """Start it, and get the answer of a first cell, which imports numpy."""

    async def call(self) -> int:
        """Count one up, and give the new number."""

    async def close(self) -> None:
        """End it."""


class SandboxSession:
    """A session of a pool."""

    def __init__(self, pool: SandboxPool) -> None:
        self._session: Session = pool.session(limits=SessionLimits(wall_seconds=ANSWER_SECONDS))

    async def first(self) -> None:
        await self._session.start()
        assert (await self._session.run(FIRST)).ok

    async def call(self) -> int:
        return int((await self._session.run("x += 1\nx", interactive=True)).stdout)

    async def close(self) -> None:
        await self._session.close()


class BareInterpreter:
    """A process of `python -i`."""

    async def first(self) -> None:
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-i", "-q", stdin=pipe, stdout=pipe, stderr=null, env={"OPENBLAS_NUM_THREADS": "1"}
        )
        await self._said(f"{FIRST}\nprint(x)\n")

    async def _said(self, text: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(text.encode())
        return int(await asyncio.wait_for(self._process.stdout.readline(), ANSWER_SECONDS))

    async def call(self) -> int:
        return await self._said("x += 1\nprint(x)\n")

    async def close(self) -> None:
        self._process.kill()
        await self._process.wait()


@dataclass(frozen=True)
class Row:
    """What one kind gave with so many live trajectories."""

    kind: str
    live: int
    first_ms: float
    """Median until the first answer, one trajectory after the other."""
    call_ms: float
    """Median of a call while all trajectories call at once."""
    calls_a_second: float
    idle_mb: float
    """PSS of one that is idle."""
    wrong: int


def _pss(known: set[int]) -> float:
    """MiB of all processes below this one but the `known`, and but the first ones of sessions' pid namespaces, whose
    memory is the forkserver's."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        if process.pid not in known and not _is_init(process.pid):
            try:
                total += process.memory_full_info().pss
            except psutil.Error:  # it has just ended
                continue
    return total / (1 << 20)


def _is_init(pid: int) -> bool:
    """Whether a process is the first of a pid namespace within a forkserver's."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    inside = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
    return len(inside) > 2 and inside[-1] == "1"


async def _measure(kind: str, new: Callable[[], Interpreter], live: int, known: set[int]) -> Row:
    trajectories = [new() for _ in range(live)]
    firsts = [await _timed(trajectory.first()) for trajectory in trajectories]
    numbers: list[int] = []
    times: list[float] = []

    async def calls(trajectory: Interpreter) -> None:
        for _ in range(CALLS):
            begun = time.perf_counter()
            numbers.append(await trajectory.call())
            times.append(time.perf_counter() - begun)

    whole = await _timed(asyncio.gather(*(calls(trajectory) for trajectory in trajectories)))
    row = Row(
        kind,
        live,
        1000 * statistics.median(firsts),
        1000 * statistics.median(times),
        live * CALLS / whole,
        _pss(known) / live,
        sum(numbers.count(number) != live for number in range(2, CALLS + 2)),
    )
    await asyncio.gather(*(trajectory.close() for trajectory in trajectories))
    return row


async def _timed(work: Awaitable[object]) -> float:
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun


async def _run(live: list[int]) -> list[Row]:
    rows = []
    async with SandboxPool(workers=1, max_sessions=max(live) + 1) as pool:
        known = {process.pid for process in psutil.Process().children(recursive=True)}
        async with pool.session():  # starts the forkserver
            pass
        for number in live:
            rows.append(await _measure("session", lambda: SandboxSession(pool), number, known))
            beside = known | {process.pid for process in psutil.Process().children(recursive=True)}
            rows.append(await _measure("python -i", BareInterpreter, number, beside))
    return rows


def main(
    live: Annotated[list[int] | None, typer.Option(help="live trajectories; several times")] = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure, print a table, and write JSON."""
    rows = asyncio.run(_run(live or [1, 8, 64]))
    table = Table("kind", "live", "first answer, ms", "call, ms", "calls/s", "idle, MiB", "wrong", title="sessions")
    for row in rows:
        figures = (row.first_ms, row.call_ms, row.calls_a_second, row.idle_mb)
        table.add_row(row.kind, str(row.live), *(f"{figure:.2f}" for figure in figures), str(row.wrong))
    Console().print(table)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps({"cores": os.cpu_count(), "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    typer.run(main)
