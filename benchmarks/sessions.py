"""The tools with state, called over HTTP, beside verl-tool's and beside a bare process for each trajectory, in one run.

    python benchmarks/sessions.py --peer-url http://127.0.0.1:5100

The script starts this project's server. That of TIGER-AI-Lab/verl-tool is started before, in an environment of its own:

    git clone https://github.com/TIGER-AI-Lab/verl-tool peer && cd peer && python3.11 -m venv .venv
    .venv/bin/pip install fire fastapi uvicorn httptools uvloop httpx ray ipython psutil regex requests tqdm
    RAY_TMPDIR=/tmp/peer .venv/bin/python -m verl_tool.servers.tool_server --tool_type ipython_code,bash_terminal \
        --host 127.0.0.1 --port 5100

That is one server without a router before it and without firejail: the least work that it can have. The bare processes
are `python -i` and `bash` with pipes, without isolation and without limits.

Every trajectory counts its calls in a variable, so that each answer is checked. The number of live trajectories grows;
the systems take turns: read the ratios. Memory is the proportional set size (PSS: what processes
share counts once) and page tables.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import psutil
import typer
from load import Cell, in_turn, measure, memory_of_tree
from rich.console import Console
from served_tools import Connections, running, server_command

from verl_tool.servers.serve.ports import free_ports

SERVED, PEER, BARE = "this server", "verl-tool", "bare process"
TOOLS = ("bash_terminal", "ipython_code")
"""The peer keeps the processes of its `ipython_code`, so this one comes last."""
CODE = {
    "ipython_code": "n = globals().get('n', 0) + 1; print('n=' + str(n))  # TURN",
    "bash_terminal": "export n=$((n + 1)); echo n=$n # TURN",
}
"""What a call runs. The peer answers a request that it has seen from a cache, so each differs from the one before."""
TAGS = {"ipython_code": "<python>{}</python>", "bash_terminal": "<bash>{}</bash>"}
BARE_COMMANDS = {"ipython_code": (sys.executable, "-i", "-q"), "bash_terminal": ("bash",)}
ANSWER_SECONDS = 120.0
GROW_SECONDS = 300.0
"""For one system to get to the next number of live trajectories."""
FIRSTS = 8
"""First answers that are timed on the way to each number, one trajectory after the other."""
STARTS_AT_ONCE = 8
LONG, SHORT = 64, 8
"""Turns of the trajectories whose last calls are compared with the first calls of new ones, and how many calls."""

console = Console(stderr=True)


class Trajectory(ABC):
    """Python state, or a shell, that counts its calls."""

    def __init__(self) -> None:
        self.turn = 0

    async def ask(self) -> str:
        """Make the next call. Returns what is wrong with its answer: nothing if it is right."""
        self.turn += 1
        try:
            text = await asyncio.wait_for(self._answer(), ANSWER_SECONDS)
        except (OSError, EOFError, RuntimeError, ValueError, asyncio.TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        numbers = re.findall(r"n=(\d+)", text)
        return "" if numbers[-1:] == [str(self.turn)] else f"a wrong answer: {text}"

    @abstractmethod
    async def _answer(self) -> str:
        """To the call of this turn."""

    @abstractmethod
    async def close(self) -> None:
        """End it."""


class OverHTTP(Trajectory):
    """One at a tool server."""

    def __init__(self, connections: Connections, tool: str) -> None:
        super().__init__()
        self._connections, self._tool, self._id = connections, tool, f"{tool}-{uuid.uuid4().hex}"

    async def _answer(self) -> str:
        action = TAGS[self._tool].format(CODE[self._tool].replace("TURN", str(self.turn)))
        answer = await self._connections.post({"trajectory_ids": [self._id], "actions": [action]})
        return str([fault for fault in answer.get("faults") or () if fault] or answer["observations"])

    async def close(self) -> None:
        await self._connections.post({"trajectory_ids": [self._id], "actions": [""], "finish": [True]})


class InProcess(Trajectory):
    """One in a process of its own."""

    def __init__(self, tool: str, pids: set[int]) -> None:
        super().__init__()
        self._tool, self._pids = tool, pids
        self._process: asyncio.subprocess.Process | None = None

    async def _answer(self) -> str:
        if self._process is None:
            pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
            self._process = await asyncio.create_subprocess_exec(
                *BARE_COMMANDS[self._tool], stdin=pipe, stdout=pipe, stderr=null, env={"PATH": os.environ["PATH"]}
            )
            self._pids.add(self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(CODE[self._tool].encode() + b"\n")
        return (await self._process.stdout.readline()).decode()

    async def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._pids.discard(self._process.pid)


class System:
    """What holds trajectories of one tool, and those that are live in it."""

    def __init__(self, name: str, tool: str, new: Callable[[], Trajectory], pids: Iterable[int]) -> None:
        """`pids`: of the processes that hold them, descendants apart."""
        self.name, self.tool, self._new, self._pids = name, tool, new, pids
        self.live: deque[Trajectory] = deque()
        self._idle: list[Trajectory] = []
        self.errors: Counter[str] = Counter()
        self.stopped = ""
        """Why it holds fewer than it was to hold."""

    def memory(self) -> int:
        """Bytes."""
        return memory_of_tree(list(self._pids))

    async def start(self) -> float:
        """Have one for each core live from now on that is not used: what a server starts for all of them is started.
        Returns the seconds until the first answer."""
        begun = time.perf_counter()
        await self.add(self._idle)
        seconds = time.perf_counter() - begun
        for _ in range(1, os.cpu_count() or 1):
            await self.add(self._idle)
        return seconds

    async def add(self, to: deque[Trajectory] | list[Trajectory] | None = None) -> float:
        """Seconds until the first answer of one more."""
        trajectory = self._new()
        begun = time.perf_counter()
        await self.ask(trajectory)
        (self.live if to is None else to).append(trajectory)
        return time.perf_counter() - begun

    async def grow(self, live: int, spare_bytes: int) -> None:
        """Have so many live, unless memory or time end first."""
        deadline, self.stopped = time.monotonic() + GROW_SECONDS, ""
        while len(self.live) < live and not self.stopped:
            if psutil.virtual_memory().available < spare_bytes:
                self.stopped = f"the machine had less than {spare_bytes / 2**30:.1f} GiB of memory left"
            elif time.monotonic() > deadline:
                self.stopped = f"{GROW_SECONDS:g} s had passed"
            else:
                await asyncio.gather(*(self.add() for _ in range(min(STARTS_AT_ONCE, live - len(self.live)))))

    async def ask(self, trajectory: Trajectory) -> int:
        """1 if the answer was right."""
        wrong = await trajectory.ask()
        if wrong:
            self.errors[re.sub(r"\d+", "#", wrong)[:200]] += 1
        return int(not wrong)

    async def measure(self, level: int, seconds: float) -> Cell:
        """All that are live call again and again, each one call at a time."""

        async def call(_: int) -> int:
            trajectory = self.live.popleft()
            try:
                return await self.ask(trajectory)
            finally:
                self.live.append(trajectory)

        console.print(f"[dim]{self.tool} {level:4} live: {self.name}[/]")
        what = {"system": self.name, "snippet": self.tool, "concurrency": len(self.live), "seconds": seconds}
        cell = await measure(call, **what, deadline_seconds=600.0)
        return Cell(**{**asdict(cell), "concurrency": level})

    async def close(self) -> None:
        while self.live or self._idle:
            for _ in range(min(STARTS_AT_ONCE, len(self.live) + len(self._idle))):
                await (self.live or self._idle).pop().close()


@dataclass(frozen=True)
class Row:
    """What one system gave with so many live trajectories."""

    tool: str
    system: str
    live: int
    first_ms: float
    """Median until the first answer of a trajectory, of up to `FIRSTS`."""
    p50_ms: float
    p95_ms: float
    """Of a call, while all trajectories call at once."""
    calls_a_second: float
    ratio: float | None
    """Of `calls_a_second` to the baseline's: the median of the rounds."""
    ratios: tuple[float, ...]
    idle_mib: float
    """Of each trajectory that was added since the number before."""
    wrong: int
    stopped: str
    """Why there are not more."""
    load_average: float


async def compare(
    systems: Sequence[System], levels: Sequence[int], seconds: float, rounds: int, spare_bytes: int
) -> list[Row]:
    """All systems at all numbers of live trajectories. The first one is the baseline."""
    rows: list[Row] = []
    held = {system.name: (system.memory(), 0) for system in systems}
    for level in levels:
        firsts: dict[str, list[float]] = {system.name: [] for system in systems}
        for _ in range(FIRSTS):
            for system in systems:
                if len(system.live) < level:
                    firsts[system.name].append(await system.add())
        for system in systems:
            await system.grow(level, spare_bytes)
        cells = await in_turn([partial(s.measure, level, seconds) for s in systems], rounds, systems[0].name)
        for system, cell in zip(systems, cells, strict=True):
            (bytes_before, live_before), live = held[system.name], len(system.live)
            held[system.name] = (system.memory(), live)
            added = (held[system.name][0] - bytes_before) / 2**20 / max(1, live - live_before)
            first = 1000 * statistics.median(firsts[system.name] or [float("nan")])
            rows.append(
                Row(system.tool, system.name, live, first, cell.p50_ms, cell.p95_ms, cell.per_second, cell.ratio,
                    cell.ratios, added, cell.errors, system.stopped, os.getloadavg()[0])
            )  # fmt: skip
            console.print(str(rows[-1]))
    return rows


async def later_turns(system: System) -> dict[str, float]:
    """Milliseconds of a call, median: the last of `LONG` turns, and the first turns of new trajectories, in turn."""
    await system.close()
    await system.grow(2 * SHORT, 0)
    old, young = list(system.live)[:SHORT], list(system.live)[SHORT:]
    for trajectory in old:
        for _ in range(LONG - SHORT - 1):
            await system.ask(trajectory)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(SHORT):
        for pair in zip(old, young, strict=True):
            for when, trajectory in zip(times, pair, strict=True):
                begun = time.perf_counter()
                await system.ask(trajectory)
                when.append(time.perf_counter() - begun)
    late, early = (1000 * statistics.median(when) for when in times)
    return {"late_ms": late, "early_ms": early, "late_to_early": late / early}


async def used_again(system: System) -> float:
    """Milliseconds until the first answer, median, after as many trajectories were finished."""
    some = [system.live.pop() for _ in range(min(FIRSTS, len(system.live)))]
    for trajectory in some:
        await trajectory.close()
    return 1000 * statistics.median([await system.add() for _ in some])


async def many_live(system: System, count: int, spare_bytes: int) -> dict[str, object]:
    """So many live at once: their memory, and whether each has kept its state."""
    before, begun = system.memory(), time.perf_counter()
    await system.grow(count, spare_bytes)
    seconds = time.perf_counter() - begun
    used = system.memory() - before
    live = len(system.live)
    right = sum([await system.ask(trajectory) for trajectory in system.live])
    stopped = system.stopped
    await system.close()
    figures = {"live": live, "gib": used / 2**30, "mib_each": used / live / 2**20, "start_seconds": seconds}
    return {**figures, "right_afterwards": right, "stopped": stopped, "errors": dict(system.errors)}


def listener(url: str) -> int:
    """The process that listens at the port of `url`. Raises RuntimeError if there is none here."""
    port = int(url.rpartition(":")[2].strip("/"))
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return connection.pid
    raise RuntimeError(f"no process of this machine listens at {url}")


def aims(rows: Sequence[Row], facts: dict) -> list[tuple[str, str, bool]]:
    """Aim, what was seen, and whether it was met."""
    seen: list[tuple[str, str, bool]] = []
    for tool in TOOLS:
        ours, theirs = ([r for r in rows if (r.tool, r.system) == (tool, name)] for name in (SERVED, PEER))
        if ours and theirs:
            first, their_first = (statistics.median(r.first_ms for r in of) for of in (ours, theirs))
            text = f"{first:.0f} ms, {their_first:.0f} ms: {their_first / first:.1f}x"
            seen.append((f"{tool}: first answer 20x sooner than verl-tool's", text, their_first >= 20 * first))
            text = ", ".join(f"{row.live} live: {row.ratio or 0.0:.1f}x" for row in ours)
            seen.append((f"{tool}: 5x its calls a second", text, all((row.ratio or 0.0) >= 5 for row in ours)))
            idle, their_idle = ours[-1].idle_mib, theirs[-1].idle_mib
            text = f"{idle:.2f} MiB, {their_idle:.2f} MiB: {their_idle / idle:.1f}x"
            seen.append((f"{tool}: a twentieth of its memory of an idle session", text, their_idle >= 20 * idle))
    many = facts.get("many_live")
    if many:
        kept = many["gib"] <= 6 and many["right_afterwards"] == many["live"] >= 1000
        seen.append(("1,000 live sessions within 6 GB", f"{many['live']} in {many['gib']:.2f} GiB", kept))
    for tool, turns in facts["turns"].items():
        ratio = turns["late_to_early"]
        seen.append((f"{tool}: the 64th turn as fast as the first", f"{ratio:.2f}x its time", ratio < 1.1))
    return seen


def markdown(rows: Sequence[Row], baseline: str) -> str:
    """A table."""
    head = f"tool | live | system | first answer, ms | call p50, ms | p95 | calls/s | to {baseline} | idle, MiB | wrong"
    lines = [f"| {head} |", "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|"]
    for r in rows:
        spread = f"{r.ratio:.2f}x ({min(r.ratios):.2f}-{max(r.ratios):.2f})" if r.ratio is not None else ""
        times = f"{r.first_ms:.0f} | {r.p50_ms:.1f} | {r.p95_ms:.1f} | {r.calls_a_second:.0f}"
        lines.append(f"| {r.tool} | {r.live} | {r.system} | {times} | {spread} | {r.idle_mib:.2f} | {r.wrong} |")
    return "\n".join(lines)


def _systems(tool: str, ours: Connections, ours_pid: int, peer: Connections | None, peer_pid: int) -> list[System]:
    pids: set[int] = set()
    found = [
        System(SERVED, tool, lambda: OverHTTP(ours, tool), [ours_pid]),
        System(BARE, tool, lambda: InProcess(tool, pids), pids),
    ]
    return found if peer is None else [System(PEER, tool, lambda: OverHTTP(peer, tool), [peer_pid]), *found]


async def run(
    peer_url: str | None, levels: list[int], seconds: float, rounds: int, many: int, spare_bytes: int
) -> tuple[list[Row], dict]:
    """All figures."""
    rows: list[Row] = []
    facts: dict = {"cores": os.cpu_count(), "memory_gib": psutil.virtual_memory().total / 2**30}
    facts |= {"load_average_before": os.getloadavg(), "turns": {}, "used_again_ms": {}, "errors": {}}
    config = Path(tempfile.mkdtemp()) / "config.json"
    config.write_text(json.dumps({"tools": {tool: {"max_sessions": max([*levels, many]) + 100} for tool in TOOLS}}))
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [*server_command(port, ",".join(TOOLS)), "--tool_config", str(config)]
    peer, peer_pid = (Connections(peer_url), listener(peer_url)) if peer_url else (None, 0)
    async with running(command, url + "/health") as server, Connections(url) as ours:
        systems = {tool: _systems(tool, ours, server.pid, peer, peer_pid) for tool in TOOLS}
        served = [system for system in systems["ipython_code"] if system.name != BARE]
        facts["server_gib"] = {system.name: system.memory() / 2**30 for system in served}
        facts["first_of_all_ms"] = {system.name: 1000 * await system.start() for system in served}
        for system in served:
            await system.close()
        if many:
            facts["many_live"] = await many_live(served[-1], many, spare_bytes)
            console.print(facts["many_live"])
        for tool in TOOLS:
            for system in systems[tool]:
                await system.start()
            rows += await compare(systems[tool], levels, seconds, rounds, spare_bytes)
            for system in systems[tool]:
                if system.name != BARE:
                    facts["used_again_ms"].setdefault(tool, {})[system.name] = await used_again(system)
                if system.name == SERVED:
                    facts["turns"][tool] = await later_turns(system)
                await system.close()
            facts["errors"][tool] = {system.name: dict(system.errors) for system in systems[tool]}
    return rows, facts | {"load_average_after": os.getloadavg()}


def main(
    peer_url: Annotated[str | None, typer.Option(help="Of verl-tool's server.")] = None,
    live: Annotated[str, typer.Option(help="Live trajectories, comma separated, from few to many.")] = "1,8,64,256",
    seconds: Annotated[float, typer.Option(help="How long a round keeps a system busy.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured; the median counts.")] = 3,
    many: Annotated[int, typer.Option(help="Sessions that are to live at once; 0 leaves it out.")] = 1000,
    spare_gib: Annotated[float, typer.Option(help="No trajectory starts with less memory left on the machine.")] = 3.0,
    output: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")] = Path(
        "outputs/benchmarks/sessions.json"
    ),
) -> None:
    """Measure; print tables, write JSON and Markdown."""
    levels = [int(level) for level in live.split(",")]
    rows, facts = asyncio.run(run(peer_url, levels, seconds, rounds, many, int(spare_gib * 2**30)))
    reached = aims(rows, facts)
    lines = [
        "| aim | seen | met |",
        "|---|---|---|",
        *(f"| {aim} | {seen} | {'yes' if met else 'no'} |" for aim, seen, met in reached),
    ]
    text = "\n".join([markdown(rows, PEER if peer_url else SERVED), "", *lines, ""])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**facts, "aims": reached, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    output.with_suffix(".md").write_text(text)
    print(text, json.dumps(facts, indent=2), sep="\n")


if __name__ == "__main__":
    typer.run(main)
