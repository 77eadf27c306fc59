"""What the benchmarks share: a closed-loop load, what a tree of processes used, percentiles, a table."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 1.0, 10.0
"""When memory is looked at, from the start of the load on."""

Call = Callable[[int], Awaitable[int]]
"""One request; given its number, it returns how many executions were answered as they should be."""


@dataclass(frozen=True)
class Usage:
    """What a process and all that descend from it used."""

    cpu_seconds: float
    """User and system time, of children that have ended too."""
    memory_bytes: int
    """Proportional set size: shared pages are counted once."""
    processes: int


def usage_of_tree(pids: Sequence[int], without: Sequence[int] = ()) -> Usage:
    """Sum over `pids` and their descendants, less those of `without`. Processes that end meanwhile are left out."""
    skipped = {process.pid for pid in without for process in _tree(pid)}
    members = {process.pid: process for pid in pids for process in _tree(pid) if process.pid not in skipped}
    cpu, memory = 0.0, 0
    for process in members.values():
        try:
            times = process.cpu_times()
            memory += process.memory_full_info().pss
        except psutil.Error:
            continue
        cpu += times.user + times.system + times.children_user + times.children_system
    return Usage(cpu, memory, len(members))


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def family_of(pids: Iterable[int]) -> list[int]:
    """`pids` and all that descend from them."""
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process.pid)
    found = list(dict.fromkeys(pids))
    for pid in found:
        found += children.get(pid, ())
    return found


def pids_by_namespace(pid: int) -> list[int]:
    """The ids of a process in its pid namespaces, from the outermost to its own; empty if it has ended."""
    return _status(pid).get("NSpid", [])


def memory_of_tree(pids: Iterable[int]) -> int:
    """Proportional set size and page tables, in bytes, of `pids` and all that descend from them. The first processes of
    the sandbox's pid namespaces are left out: they run in the memory of their forkserver."""
    total = 0
    for pid in family_of(pids):
        status = _status(pid)
        inside = status.get("NSpid", [])
        if len(inside) > 2 and inside[-1] == 1:
            continue
        try:
            total += psutil.Process(pid).memory_full_info().pss + 1024 * status.get("VmPTE", [0])[0]
        except psutil.Error:  # it has just ended
            continue
    return total


def _status(pid: int) -> dict[str, list[int]]:
    """The lines of /proc/PID/status that hold numbers; none if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    named = (line.partition(":")[::2] for line in lines)
    return {name: [int(word) for word in text.split() if word.isdigit()] for name, text in named}


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    system: str
    snippet: str
    concurrency: int
    executions: int
    errors: int
    per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    cpu_ms: float
    """CPU per execution in milliseconds, of the system under test, without the load generator."""
    memory_mb: float
    """Highest memory seen under load, in MiB."""
    ratio: float | None = None
    """Throughput against the baseline of the same snippet and concurrency."""
    ratios: tuple[float, ...] = ()
    """That of each round."""


def percentile(values: Sequence[float], q: float) -> float:
    """The nearest-rank percentile; `q` in [0, 1]."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


async def measure(
    call: Call,
    *,
    system: str,
    snippet: str,
    concurrency: int,
    seconds: float,
    executions_per_call: int = 1,
    pids: Sequence[int] = (),
    without: Sequence[int] = (),
    max_calls: int | None = None,
    deadline_seconds: float = 180.0,
) -> Cell:
    """Keep `concurrency` calls under way for `seconds` (one call at least), then wait for those still out.

    Throughput is all executions over all the time until the last answer. A call that raises counts as an error. CPU and
    memory are those of the processes `pids` and their descendants, less `without` and theirs.
    """
    latencies: list[float] = []
    answered = sent = 0
    peak = 0
    start = time.perf_counter()

    async def worker() -> None:
        nonlocal answered, sent
        # One at least, however late it is by then.
        while not sent or (time.perf_counter() - start < seconds and (max_calls is None or sent < max_calls)):
            number, sent = sent, sent + 1
            began = time.perf_counter()
            try:
                right = await call(number)
                answered += right
            except (OSError, RuntimeError, asyncio.TimeoutError, ValueError) as error:
                if not isinstance(error, asyncio.TimeoutError):
                    Console(stderr=True).print(
                        f"[red]{system}/{snippet}[/]: {type(error).__name__}: {str(error)[:200]}"
                    )
            latencies.append(time.perf_counter() - began)

    async def watch_memory() -> None:
        nonlocal peak
        # Seldom: a look at a tree of many large processes costs as much as ten calls, and the load shares the machine.
        await asyncio.sleep(_FIRST_LOOK_SECONDS)
        while True:
            peak = max(peak, (await asyncio.to_thread(usage_of_tree, pids, without)).memory_bytes)
            await asyncio.sleep(_LOOK_SECONDS)

    before = usage_of_tree(pids, without)
    watcher = asyncio.create_task(watch_memory())
    try:
        await asyncio.wait_for(asyncio.gather(*[worker() for _ in range(concurrency)]), deadline_seconds)
    finally:
        watcher.cancel()
    elapsed = time.perf_counter() - start
    after = usage_of_tree(pids, without)
    total = sent * executions_per_call
    return Cell(
        system=system,
        snippet=snippet,
        concurrency=concurrency,
        executions=total,
        errors=total - answered,
        per_second=answered / elapsed,
        p50_ms=percentile(latencies, 0.50) * 1e3,
        p95_ms=percentile(latencies, 0.95) * 1e3,
        p99_ms=percentile(latencies, 0.99) * 1e3,
        cpu_ms=(after.cpu_seconds - before.cpu_seconds) / max(total, 1) * 1e3,
        memory_mb=peak / 2**20,
    )


def middle(cells: Sequence[Cell]) -> Cell:
    """Of repeated measurements of the same thing, the one with the median throughput; the errors of all of them."""
    chosen = sorted(cells, key=lambda cell: cell.per_second)[(len(cells) - 1) // 2]
    return replace(chosen, errors=sum(cell.errors for cell in cells))


async def in_turn(measurements: Sequence[Callable[[], Awaitable[Cell]]], rounds: int, baseline: str) -> list[Cell]:
    """Each measurement `rounds` times, one after the other, back and forth; of each the `middle`.

    `ratio` is the median of the rounds' ratios to the system `baseline`: what slows the machine down for a minute slows
    down both sides of one round.
    """
    seen: list[list[Cell]] = []
    for number in range(rounds):
        turn = measurements[:: -1 if number % 2 else 1]
        cells = with_ratios([await each() for each in turn], baseline)
        seen.append(cells[:: -1 if number % 2 else 1])
    return [_over_rounds(same) for same in zip(*seen, strict=True)]


def _over_rounds(cells: Sequence[Cell]) -> Cell:
    ratios = [cell.ratio for cell in cells if cell.ratio is not None]
    return replace(middle(cells), ratio=statistics.median(ratios) if ratios else None, ratios=tuple(ratios))


def with_ratios(cells: Sequence[Cell], baseline: str) -> list[Cell]:
    """The same cells with `ratio` filled in against system `baseline`."""
    base = {(c.snippet, c.concurrency): c.per_second for c in cells if c.system == baseline}
    filled = []
    for cell in cells:
        against = base.get((cell.snippet, cell.concurrency))
        filled.append(replace(cell, ratio=cell.per_second / against if against else None))
    return filled


def _ratio_text(cell: Cell) -> str:
    """The ratio, and the lowest and the highest of the rounds."""
    if cell.ratio is None:
        return ""
    digits = 0 if cell.ratio >= 10 else 2 if cell.ratio < 2 else 1
    spread = f" ({min(cell.ratios):.{digits}f}-{max(cell.ratios):.{digits}f})" if len(set(cell.ratios)) > 1 else ""
    return f"{cell.ratio:.{digits}f}x{spread}"


def print_cells(cells: Sequence[Cell], title: str) -> None:
    """A readable table."""
    table = Table(title=title)
    for column in (
        "snippet",
        "at once",
        "system",
        "per s",
        "ratio",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "CPU ms",
        "MiB",
        "errors",
    ):
        table.add_column(column, justify="left" if column in ("snippet", "system") else "right")
    for c in sorted(cells, key=lambda c: (c.snippet, c.concurrency)):
        ratio = _ratio_text(c)
        numbers = [f"{c.p50_ms:.1f}", f"{c.p95_ms:.1f}", f"{c.p99_ms:.1f}", f"{c.cpu_ms:.2f}", f"{c.memory_mb:.0f}"]
        table.add_row(c.snippet, str(c.concurrency), c.system, f"{c.per_second:.0f}", ratio, *numbers, str(c.errors))
    Console(width=140).print(table)


def markdown(cells: Sequence[Cell]) -> str:
    """The same table in Markdown."""
    lines = [
        "| snippet | at once | system | per second | ratio | p50 ms | p95 ms | p99 ms | CPU ms | MiB | errors |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for c in sorted(cells, key=lambda c: (c.snippet, c.concurrency)):
        ratio = _ratio_text(c)
        times = f"{c.p50_ms:.1f} | {c.p95_ms:.1f} | {c.p99_ms:.1f} | {c.cpu_ms:.2f}"
        what = f"{c.snippet} | {c.concurrency} | {c.system} | {c.per_second:.0f} | {ratio}"
        lines.append(f"| {what} | {times} | {c.memory_mb:.0f} | {c.errors} |")
    return "\n".join(lines)


def write_json(path: Path, cells: Sequence[Cell], **facts: object) -> None:
    """All cells and what is worth knowing about the machine."""
    machine = {"cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **facts, "cells": [asdict(c) for c in cells]}, indent=2) + "\n")
