"""Commands, cells and memory of containers: this project's beside a sandbox session and other ways, in one run.

    python benchmarks/containers.py --engine podman --image local/debian:1 --live 1,8,32,64

- `session`: a session of this project's sandbox, which is no container: the floor.
- `container`: `Container`, with a resident process that is spoken to over one pipe.
- `exec`: a container that sleeps, and a ``podman exec`` for each command.
- `swe-rex`: its server in the container, spoken to over HTTP by its own client. It needs a Python that has it, and an
  image that has its server:

      python3.11 -m venv /tmp/peers_swerex && /tmp/peers_swerex/bin/pip install swe-rex aiohttp
      printf 'FROM local/debian:1\\nRUN apt-get update && apt-get install -y python3-pip && pip install \\
          --break-system-packages swe-rex\\n' | podman build --network host -t local/swerex:1 -

Containers of a system start all at once, in its own queue if it has one. Memory is the proportional set size (PSS) and
page tables of all processes of a container: those whose command line has its name, and their descendants. Each answer
is checked. The containers of all systems live at the same time, and the systems take turns: read the ratios.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from load import Cell, measure, memory_of_tree, middle, percentile
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from verl_tool.content.packed_files import pack
from verl_tool.errors import SandboxError, ToolFault
from verl_tool.sandbox import SandboxPool, SessionLimits
from verl_tool.sandbox.backends import ContainerPool, ContainerSettings, WorkspaceSandbox
from verl_tool.sandbox.backends.engine import ContainerEngine
from verl_tool.servers.tools.workspace.verifier import verify
from verl_tool.verification import Verification

SYSTEMS = ("session", "container", "exec", "swe-rex")
LINE, LINE_OUTPUT = "x=20; echo $((x + 22))", "42\n"
CELL = "n = globals().get('n', 0) + 1; print(n)"
LIMITS = SessionLimits(wall_seconds=60, memory_bytes=512 << 20, total_wall_seconds=86_400)
ULIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")
"""Podman's own are above what a machine without CAP_SYS_RESOURCE allows."""
STARTS_AT_ONCE = 8
"""Of a system that has no queue of its own, as many as `Container` starts at a time."""
ALONE = 5
"""Starts one after the other, at one live."""
LONG, PAIRS = 64, 3
"""Turns of the trajectories whose last calls are compared with the first ones of new ones, and how many of each."""
REPEATS = 5
"""Forks and verifications that are timed."""
SECONDS_TO_REST = 2.0
"""Before memory is measured."""
FILES = 100
"""Files of a workspace that is forked or verified, of 4 KiB each."""

console = Console(stderr=True)


class Box(ABC):
    """A live container or session."""

    name = ""
    """Of the engine's container."""

    def __init__(self) -> None:
        self.cells = 0

    @abstractmethod
    async def run(self, command: Sequence[str]) -> tuple[int | None, str]:
        """Run a command, and return its exit code and stdout."""

    async def run_cell(self, code: str) -> str:
        """Run a cell of Python, and return its stdout."""
        raise NotImplementedError

    @abstractmethod
    async def close(self) -> None:
        """End it."""

    async def run_true(self) -> int:
        """1 if ``true`` ends as it should."""
        return int(await self.run(("true",)) == (0, ""))

    async def run_line(self) -> int:
        """1 if a line of bash gives the right output."""
        return int(await self.run(("bash", "-c", LINE)) == (0, LINE_OUTPUT))

    async def count_cell(self) -> int:
        """1 if a cell finds the state of those before it."""
        self.cells += 1
        return int(await self.run_cell(CELL) == f"{self.cells}\n")


ACTIONS: dict[str, Callable[[Box], Awaitable[int]]] = {
    "commands": Box.run_true,
    "lines": Box.run_line,
    "cells": Box.count_cell,
}


class System(ABC):
    """A way to have containers or sessions."""

    has_cells = False

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    async def open(self) -> Box:
        """Start one."""

    @abstractmethod
    async def close(self) -> None:
        """End what is shared by all."""

    def note_memory(self) -> None:  # noqa: B027  (not all need it)
        """What is used now is not that of the containers to come."""

    def memory(self, boxes: Sequence[Box]) -> int:
        """Bytes of the processes of these, as far as they are theirs alone."""
        names = [box.name for box in boxes]
        return memory_of_tree(processes_named(names))


def processes_named(names: Sequence[str]) -> list[int]:
    """Processes whose command line has one of these words or a word that contains one."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if process.pid != os.getpid() and any(name in words for name in names):
            found.append(process.pid)
    return found


class ProductBox(Box):
    """A session or a `Container`."""

    def __init__(self, sandbox: WorkspaceSandbox, name: str = "") -> None:
        super().__init__()
        self.sandbox, self.name = sandbox, name

    async def run(self, command: Sequence[str]) -> tuple[int | None, str]:
        result = await self.sandbox.exec(command)
        return result.exit_code, result.stdout

    async def run_cell(self, code: str) -> str:
        return (await self.sandbox.run(code)).stdout

    async def close(self) -> None:
        await self.sandbox.stop()


class Sessions(System):
    """Sessions of one `SandboxPool`."""

    has_cells = True

    def __init__(self, pool: SandboxPool) -> None:
        super().__init__("session")
        self._pool, self._before = pool, memory_of_tree([os.getpid()])

    async def open(self) -> ProductBox:
        session = self._pool.session(limits=LIMITS)
        await session.start()
        return ProductBox(session)

    async def close(self) -> None:
        await self._pool.close()

    def memory(self, boxes: Sequence[Box]) -> int:
        return memory_of_tree([os.getpid()]) - self._before

    def note_memory(self) -> None:
        self._before = memory_of_tree([os.getpid()])


class Containers(System):
    """Those of a `ContainerPool`, none of them started ahead of time."""

    has_cells = True

    def __init__(self, settings: ContainerSettings) -> None:
        super().__init__("container")
        self._pool = ContainerPool(settings, LIMITS, warm=0)

    async def open(self) -> ProductBox:
        container = await self._pool.take()
        return ProductBox(container, container.name)

    async def close(self) -> None:
        await self._pool.close()


class ExecBox(Box):
    """A container that sleeps."""

    def __init__(self, engine: ContainerEngine, name: str) -> None:
        super().__init__()
        self._engine, self.name = engine, name

    async def run(self, command: Sequence[str]) -> tuple[int | None, str]:
        ran = await self._engine.run(["exec", "--interactive", self.name, *command], seconds=120)
        return ran.code, ran.stdout.decode()

    async def close(self) -> None:
        await self._engine.run(["rm", "--force", "--time", "0", self.name], seconds=60)


class Execs(System):
    """A process of the engine's command line for each command."""

    def __init__(self, engine: ContainerEngine, image: str) -> None:
        super().__init__("exec")
        self._engine, self._image = engine, image
        self._starting = asyncio.Semaphore(STARTS_AT_ONCE)

    async def open(self) -> ExecBox:
        name = f"exec-bench-{secrets.token_hex(6)}"
        arguments = ["run", "--detach", "--rm", "--init", "--network", "none", *ULIMITS, "--name", name, self._image]
        async with self._starting:
            ran = await self._engine.run([*arguments, "sleep", "100000"], seconds=120)
        if ran.code != 0:
            raise RuntimeError(ran.stderr.decode())
        return ExecBox(self._engine, name)

    async def close(self) -> None:
        pass


class SweRexBox(Box):
    """A container with swe-rex's server."""

    def __init__(self, system: SweRex, number: int, name: str) -> None:
        super().__init__()
        self._system, self._number, self.name = system, number, name

    async def run(self, command: Sequence[str]) -> tuple[int | None, str]:
        answer = await self._system.ask("run", number=self._number, command=list(command))
        return answer["code"], answer["stdout"]

    async def close(self) -> None:
        await self._system.ask("close", number=self._number)

    async def shell_milliseconds(self, count: int) -> float:
        """Median of a command in a shell of it that goes on."""
        await self._system.ask("shell", number=self._number)

        async def run_in_shell() -> None:
            await self._system.ask("in_shell", number=self._number, command="true")

        return 1000 * statistics.median([await timed(run_in_shell) for _ in range(count)])


class SweRex(System):
    """The process `container_peer.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__("swe-rex")
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(cls, python: str, engine: str, image: str) -> SweRex:
        """Start the process."""
        pipe, script = asyncio.subprocess.PIPE, str(Path(__file__).with_name("container_peer.py"))
        arguments = (script, engine, image, *ULIMITS)
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(python, *arguments, stdin=pipe, stdout=pipe, stderr=null)
        return cls(process)

    async def ask(self, operation: str, **fields: object) -> dict[str, Any]:
        """Return the answer to a request. Raises RuntimeError if it failed."""
        assert self._process.stdin is not None
        if self._reading.done():
            raise RuntimeError("the peer's process has ended; run container_peer.py by hand to see why")
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps({"id": number, "op": operation, **fields}).encode() + b"\n")
        answer = await asyncio.wait_for(future, 300)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            self._waiting.pop(answer["id"]).set_result(answer)
        for future in self._waiting.values():
            future.set_result({"error": "the peer's process has ended"})

    async def open(self) -> SweRexBox:
        answer = await self.ask("open")
        return SweRexBox(self, answer["number"], answer["name"])

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reading


@dataclass(frozen=True)
class Row:
    """What a system gave with so many live."""

    live: int
    system: str
    starts_per_second: float
    first_ms: float
    """From the request to the answer of its first command, median; at one live, of starts one after the other."""
    first_p95_ms: float
    commands_per_second: float
    """``true`` by its arguments, all live ones at once."""
    lines_per_second: float
    """Lines for ``bash -c``."""
    cells_per_second: float | None
    command_ms: float
    """Of ``true``, with one caller: the median."""
    command_p95_ms: float
    line_ms: float
    cell_ms: float | None
    idle_mib: float
    wrong: int
    load_average: float


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds."""
    begun = time.perf_counter()
    await work()
    return time.perf_counter() - begun


async def open_all(system: System, live: int) -> tuple[list[Box], list[float], float]:
    """Start so many at once. Returns them, the seconds until each one's first answer, and the seconds in all."""

    async def open_one() -> tuple[Box, float]:
        begun = time.perf_counter()
        box = await system.open()
        if not await box.run_true():
            raise RuntimeError(f"{system.name}: the first command failed")
        return box, time.perf_counter() - begun

    begun = time.perf_counter()
    opened = await asyncio.gather(*(open_one() for _ in range(live)))
    return [box for box, _ in opened], [first for _, first in opened], time.perf_counter() - begun


async def close_all(boxes: Sequence[Box]) -> None:
    """End them, a few at a time."""
    for begin in range(0, len(boxes), STARTS_AT_ONCE):
        await asyncio.gather(*(box.close() for box in boxes[begin : begin + STARTS_AT_ONCE]))


async def measure_level(systems: Sequence[System], live: int, seconds: float, rounds: int) -> list[Row]:
    """All figures with so many live in each system. They take turns: what slows the machine down slows all of them."""
    firsts: dict[str, list[float]] = {system.name: [] for system in systems}
    took = dict.fromkeys(firsts, 0.0)
    for system in [*systems] * (ALONE if live == 1 else 0):
        boxes, first, in_all = await open_all(system, 1)
        await close_all(boxes)
        firsts[system.name] += first
        took[system.name] += in_all
    live_boxes: dict[str, list[Box]] = {}
    idle: dict[str, float] = {}
    try:
        for system in systems:
            system.note_memory()
            boxes, first, in_all = await open_all(system, live)
            live_boxes[system.name] = boxes
            firsts[system.name] += first
            took[system.name] += in_all
            await asyncio.sleep(SECONDS_TO_REST)
            idle[system.name] = system.memory(boxes) / live / 2**20
            if system.has_cells:  # the first one starts a Python
                await asyncio.gather(*(box.count_cell() for box in boxes))
        figures: dict[tuple[str, str, int], list[Cell]] = {}
        for number, what, callers in itertools.product(range(rounds), ACTIONS, dict.fromkeys((1, live))):
            for system in systems[:: -1 if number % 2 else 1]:
                if what != "cells" or system.has_cells:
                    cell = await _loop(system, live_boxes[system.name], what, callers, seconds)
                    figures.setdefault((system.name, what, callers), []).append(cell)
        return [_row(s.name, live, firsts[s.name], took[s.name], figures, idle[s.name]) for s in systems]
    finally:
        for boxes in live_boxes.values():
            await close_all(boxes)


def _row(
    name: str,
    live: int,
    firsts: Sequence[float],
    took: float,
    figures: dict[tuple[str, str, int], list[Cell]],
    idle: float,
) -> Row:
    medians = {key: middle(cells) for key, cells in figures.items() if key[0] == name}

    def of(what: str, callers: int, field: str) -> Any:
        """None for what the system does not do."""
        cell = medians.get((name, what, callers))
        return cell and getattr(cell, field)

    return Row(
        live=live,
        system=name,
        starts_per_second=len(firsts) / took,
        first_ms=1000 * statistics.median(firsts),
        first_p95_ms=1000 * percentile(firsts, 0.95),
        commands_per_second=of("commands", live, "per_second"),
        lines_per_second=of("lines", live, "per_second"),
        cells_per_second=of("cells", live, "per_second"),
        command_ms=of("commands", 1, "p50_ms"),
        command_p95_ms=of("commands", 1, "p95_ms"),
        line_ms=of("lines", 1, "p50_ms"),
        cell_ms=of("cells", 1, "p50_ms"),
        idle_mib=idle,
        wrong=sum(cell.errors for cell in medians.values()),
        load_average=os.getloadavg()[0],
    )


async def _loop(system: System, boxes: Sequence[Box], what: str, callers: int, seconds: float) -> Cell:
    """Keep as many busy as there are callers, each one call at a time."""
    idle, action = deque(boxes[:callers]), ACTIONS[what]

    async def call(_: int) -> int:
        box = idle.popleft()
        try:
            return await action(box)
        except (SandboxError, ToolFault) as error:
            raise RuntimeError(str(error)) from error
        finally:
            idle.append(box)

    what_is = {"system": system.name, "snippet": what, "concurrency": callers, "seconds": seconds}
    return await measure(call, **what_is, deadline_seconds=300)


async def bare_run(engine: ContainerEngine, image: str) -> float:
    """Milliseconds until a container on a pipe, started by the engine alone, says its first word; median."""
    arguments = ["run", "--interactive", "--rm", "--init", "--network", "none", *ULIMITS, image]

    async def run() -> None:
        process = await engine.start(*arguments, "sh", "-c", "echo up; exec cat")
        assert process.stdin is not None
        assert process.stdout is not None
        if await process.stdout.readline() != b"up\n":
            raise RuntimeError("the engine did not run a container")
        processes.append(process)

    processes: list[asyncio.subprocess.Process] = []
    times = []
    for _ in range(ALONE):
        times.append(await timed(run))
        processes[-1].stdin.close()  # type: ignore[union-attr]
        await processes[-1].wait()
    return 1000 * statistics.median(times)


async def later_turns(system: System) -> dict[str, float]:
    """Milliseconds of a line, median: the last of `LONG` turns, and the first turns of new ones, in turn."""
    old, _, _ = await open_all(system, PAIRS)
    for box in old:
        for _ in range(LONG - 1 - ALONE):
            await box.run_line()
    young, _, _ = await open_all(system, PAIRS)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ALONE):
        for pair in zip(old, young, strict=True):
            for when, box in zip(times, pair, strict=True):
                when.append(await timed(box.run_line))
    await close_all([*old, *young])
    late, early = (1000 * statistics.median(when) for when in times)
    return {"late_ms": late, "early_ms": early, "late_to_early": late / early}


def packed_verification() -> Verification:
    """Of a script that looks for one file."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test.sh").write_text("test -f f1 && echo 1 > /logs/verifier/reward.txt\n")
        return Verification(files=pack(Path(folder)))


async def fork_and_verify(system: System) -> dict[str, float]:
    """Milliseconds of a fork and of a verification, with some files in the work folder; medians."""
    boxes, _, _ = await open_all(system, 1)
    (box,) = boxes
    assert isinstance(box, ProductBox)
    verification = packed_verification()
    await box.run(["bash", "-c", f"for i in $(seq {FILES}); do head -c 4096 /dev/urandom > f$i; done"])
    forks, verifications = [], []
    for _ in range(REPEATS):
        if isinstance(system, Sessions):  # which are forked with their Python state
            await box.run_cell("x = 1")
        begun = time.perf_counter()
        branch = await box.sandbox.fork()
        forks.append(time.perf_counter() - begun)
        if (await branch.exec(f"ls | wc -l; cmp f1 f{FILES}")).stdout.split()[0] != str(FILES):
            raise RuntimeError(f"{system.name}: the fork has not all files")
        await branch.stop()  # type: ignore[attr-defined]
        verdict = await verify(box.sandbox, verification)
        if verdict.reward != 1.0:
            raise RuntimeError(f"{system.name}: the verifier said {verdict}")
        verifications.append(verdict.seconds)
    await close_all(boxes)
    return {"fork_ms": 1000 * statistics.median(forks), "verify_ms": 1000 * statistics.median(verifications)}


async def run(
    engine_name: str,
    image: str,
    levels: list[int],
    seconds: float,
    rounds: int,
    peers: Sequence[str],
    python: str,
    peer_image: str,
) -> tuple[list[Row], dict[str, Any]]:
    """All figures."""
    engine, settings = ContainerEngine(engine_name), ContainerSettings(engine_name, image)
    facts: dict[str, Any] = {"cores": os.cpu_count(), "memory_gib": psutil.virtual_memory().total / 2**30}
    facts |= {"load_average_before": os.getloadavg(), "turns": {}, "fork_and_verify": {}, "failures": {}}
    rows: list[Row] = []
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with AsyncExitStack() as stack:
        systems = [await _system(name, stack, engine, settings, python, peer_image) for name in ("container", *peers)]
        systems.sort(key=lambda system: SYSTEMS.index(system.name))
        facts["bare_run_ms"] = await bare_run(engine, image)
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=len(levels) + len(systems))
            for level in levels:
                progress.update(task, description=f"{level} live")
                try:
                    rows += await measure_level(systems, level, seconds, rounds)
                except (RuntimeError, OSError, SandboxError, ToolFault, asyncio.TimeoutError) as error:
                    facts["failures"][level] = f"{type(error).__name__}: {error}"[:500]
                    progress.console.print(f"[red]{level} live: {error}")
                progress.console.print(markdown([row for row in rows if row.live == level]), highlight=False)
                progress.advance(task)
            for system in systems:
                progress.update(task, description=f"turns, forks: {system.name}")
                if isinstance(system, Sessions | Containers):
                    facts["turns"][system.name] = await later_turns(system)
                    facts["fork_and_verify"][system.name] = await fork_and_verify(system)
                if isinstance(system, SweRex):
                    box = await system.open()
                    facts["swe_rex_shell_ms"] = await box.shell_milliseconds(20)
                    await box.close()
                progress.advance(task)
            if "container" in facts["fork_and_verify"]:
                writable = Containers(ContainerSettings(engine_name, image, writable=True, workdir="/box/work"))
                facts["fork_and_verify"]["container, writable"] = await fork_and_verify(writable)
    return rows, facts | {"load_average_after": os.getloadavg()}


async def _system(
    name: str, stack: AsyncExitStack, engine: ContainerEngine, settings: ContainerSettings, python: str, image: str
) -> System:
    if name == "session":
        pool = SandboxPool(for_sessions=True)
        await pool.start()
        system: System = Sessions(pool)
        async with pool.session(limits=LIMITS) as first:  # what all share is started for it
            await first.exec(["true"])
    elif name == "container":
        system = Containers(settings)
    elif name == "exec":
        system = Execs(engine, settings.image)
    else:
        system = await SweRex.start(python, engine.command, image)
    stack.push_async_callback(system.close)
    return system


COLUMNS: dict[str, Callable[[Row], str]] = {
    "live": lambda r: str(r.live),
    "system": lambda r: r.system,
    "starts/s": lambda r: f"{r.starts_per_second:.1f}",
    "first answer, ms": lambda r: f"{r.first_ms:.0f}",
    "p95": lambda r: f"{r.first_p95_ms:.0f}",
    "`true`, ms": lambda r: f"{r.command_ms:.1f}",
    "`true` p95": lambda r: f"{r.command_p95_ms:.1f}",
    "bash, ms": lambda r: f"{r.line_ms:.1f}",
    "cell, ms": lambda r: "" if r.cell_ms is None else f"{r.cell_ms:.1f}",
    "`true`/s": lambda r: f"{r.commands_per_second:.0f}",
    "bash/s": lambda r: f"{r.lines_per_second:.0f}",
    "cells/s": lambda r: "" if r.cells_per_second is None else f"{r.cells_per_second:.0f}",
    "idle, MiB": lambda r: f"{r.idle_mib:.1f}",
    "wrong": lambda r: str(r.wrong),
}


def markdown(rows: Sequence[Row]) -> str:
    """A table."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|--:|---|" + "--:|" * (len(COLUMNS) - 2)]
    lines += [f"| {' | '.join(column(row) for column in COLUMNS.values())} |" for row in rows]
    return "\n".join(lines)


def print_table(rows: Sequence[Row]) -> None:
    """The same for a terminal."""
    table = Table(title="containers")
    for name in COLUMNS:
        table.add_column(name.replace("`", ""), justify="left" if name == "system" else "right")
    for row in rows:
        table.add_row(*(column(row) for column in COLUMNS.values()))
    Console(width=150).print(table)


def aims(rows: Sequence[Row], facts: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Aim, what was seen, and whether it was met."""
    found: list[tuple[str, str, bool]] = []
    at = {(row.live, row.system): row for row in rows}
    first = at.get((1, "container"))
    if first is not None and "bare_run_ms" in facts:
        above = first.first_ms - facts["bare_run_ms"]
        found.append(("first answer at most 100 ms above the engine's `run`", f"{above:.0f} ms above", above <= 100))
    if first is not None and (1, "session") in at:
        above = first.command_ms - at[1, "session"].command_ms
        text = f"{first.command_ms:.1f} ms, {at[1, 'session'].command_ms:.1f} ms"
        found.append(("a command at most 5 ms above a session's", text, above <= 5))
    if "container" in facts.get("turns", {}):
        ratio = facts["turns"]["container"]["late_to_early"]
        found.append(("the 64th turn as fast as the first", f"{ratio:.2f}x its time", ratio < 1.1))
    return found


def main(
    image: Annotated[str, typer.Option(help="With bash and python3.")] = "python:3.12-slim",
    engine: Annotated[str, typer.Option(help="Container engine: docker or podman.")] = "podman",
    live: Annotated[str, typer.Option(help="Live ones, comma separated.")] = "1,8,32,64",
    peers: Annotated[str, typer.Option(help="Beside `container`, comma separated.")] = "session,exec,swe-rex",
    swerex_python: Annotated[str, typer.Option(help="A Python that has swe-rex.")] = "/tmp/peers_swerex/bin/python",
    swerex_image: Annotated[str, typer.Option(help="An image that has swerex-remote.")] = "local/swerex:1",
    seconds: Annotated[float, typer.Option(help="How long a round keeps a system busy.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured; the median counts.")] = 3,
    output: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")] = Path(
        "outputs/benchmarks/containers.json"
    ),
) -> None:
    """Measure; print tables, write JSON and Markdown."""
    others = [name for name in peers.split(",") if name]
    if unknown := set(others) - set(SYSTEMS):
        raise typer.BadParameter(f"{sorted(unknown)}; there are {', '.join(SYSTEMS)}", param_hint="--peers")
    levels = [int(level) for level in live.split(",")]
    rows, facts = asyncio.run(run(engine, image, levels, seconds, rounds, others, swerex_python, swerex_image))
    reached = aims(rows, facts)
    lines = ["| aim | result | met |", "|---|---|---|"]
    lines += [f"| {aim} | {result} | {'yes' if met else 'no'} |" for aim, result, met in reached]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**facts, "aims": reached, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    output.with_suffix(".md").write_text("\n".join([markdown(rows), "", *lines, ""]))
    print_table(rows)
    print("\n".join(lines), json.dumps(facts, indent=2), sep="\n")


if __name__ == "__main__":
    typer.run(main)
