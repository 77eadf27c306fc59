"""Commands and cells in containers, some of them hostile, while containers are killed from outside: is anything lost
silently, and is anything left?

    python benchmarks/container_soak.py --image local/debian:1 --commands 2000 --containers 100

Each container counts its commands in a file and its cells in a variable, and every answer is checked. A call ends with
the right answer or with a fault; a fault without a kill counts as a loss of the back end. All of it runs in a process
of its own. Others like it are killed with SIGKILL at some moment. Afterwards the script looks for containers,
processes, mounts, control groups and images of theirs, first by themselves and then after `remove_orphans`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.progress import Progress

from verl_tool.errors import SandboxError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.sandbox import SessionLimits
from verl_tool.sandbox.backends import Container, ContainerPool, ContainerSettings
from verl_tool.sandbox.backends.engine import ContainerEngine
from verl_tool.sandbox.backends.providers.orphans import COMMIT_REPOSITORY, OWNER_LABEL, remove_orphans

HOSTILE_LINES = (
    ":(){ :|:& };:",
    "kill -9 -1",
    "head -c 1G /dev/zero > /tmp/big; rm -f /tmp/big",
    "yes",
    "(yes >&2 &); yes",
    "python3 -c \"b = []\nwhile True: b.append(b'x' * (1 << 20))\"",
    "setsid sleep 1000 & (setsid nohup sleep 1001 > /dev/null 2>&1 &); echo left",
    'python3 -c "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(1000)"',
    "sleep 1000",
    "trap '' INT TERM QUIT HUP; while :; do :; done",
    "exec 0<&- 1>&- 2>&-; sleep 1000",
    "kill -STOP $PPID $$",
    "for i in $(seq 300); do sleep 1000 & done; wait",
)
HOSTILE_CELLS = (
    "import os; os._exit(3)",
    "while True: pass",
    "b = []\nwhile True: b.append(b'x' * (1 << 20))",
    "import os; os.kill(os.getpid(), 9)",
    "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "while True: print('x' * 10000)",
    "import os; os.close(0); os.close(1); os.close(2)",
)
LIMITS = SessionLimits(
    wall_seconds=30, memory_bytes=256 << 20, processes=64, output_bytes=4096, total_wall_seconds=3600
)
HOSTILE_SECONDS = 1.5
ORDINARY_SECONDS = 60.0
END_SECONDS = 40.0
"""For what is left to end by itself."""
MAX_SAMPLES = 20

console = Console(stderr=True)


@dataclass
class Soak:
    """What became of the calls of one process."""

    log: Path
    """One line for each container: its name, and its number at the engine."""
    hostile_every: int = 8
    seen: Counter[str] = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)
    """Of answers that are neither right nor a fault after a kill."""

    def sample(self, what: str, text: str) -> None:
        """Count, and store the first few."""
        self.seen[what] += 1
        if len(self.samples) < MAX_SAMPLES:
            self.samples.append(f"{what}: {text[:400]}")


class Trajectory:
    """One container, and what its next calls should find."""

    def __init__(self, soak: Soak, container: Container) -> None:
        self._soak, self._container = soak, container
        self._commands = self._cells = 0
        self.killed = ""
        """How it was killed from outside, if it was."""

    async def live(self, calls: int) -> int:
        """Make calls until one ends with a fault. Returns how many were made."""
        for number in range(calls):
            hostile = random.randrange(self._soak.hostile_every) == 0
            try:
                await (self._cell(hostile) if random.randrange(3) == 0 else self._command(hostile))
            except ToolFault as fault:
                # That of a container whose programs are root may be theirs.
                lost = fault.kind in (FaultKind.STATE_LOST, FaultKind.TOOL_CRASHED)
                if self.killed and lost:
                    self._soak.seen[f"fault {fault.kind.value} after {self.killed}"] += 1
                else:
                    self._soak.sample("a fault without a kill", f"{fault} ({self.killed or 'not killed'})")
                return number + 1
            except SandboxError as error:
                if self.killed:
                    self._soak.seen[f"fault sandbox after {self.killed}"] += 1
                else:
                    self._soak.sample("a sandbox error without a kill", str(error))
                return number + 1
        return calls

    async def _command(self, hostile: bool) -> None:
        name = self._container.name
        if hostile:
            line = random.choice(HOSTILE_LINES)
            result = await self._container.exec(line, wall_seconds=HOSTILE_SECONDS)
            self._soak.seen["hostile command answered"] += 1
            if result.wall_seconds > HOSTILE_SECONDS + 10:
                self._soak.sample("a late answer", f"{line!r}: {result.wall_seconds:.1f} s")
            return
        line = f'n=$(($(cat n 2> /dev/null || echo 0) + 1)); echo $n > n; echo "n=$n of={name}"; echo err >&2'
        result = await self._container.exec(line, wall_seconds=ORDINARY_SECONDS)
        self._commands += 1
        expected = f"n={self._commands} of={name}\n"
        if (result.exit_code, result.stdout, result.stderr) == (0, expected, "err\n"):
            self._soak.seen["right"] += 1
        else:
            self._soak.sample("a wrong answer", f"{result}; {self.killed or 'not killed'}; expected {expected!r}")

    async def _cell(self, hostile: bool) -> None:
        name = self._container.name
        code = (
            random.choice(HOSTILE_CELLS) if hostile else f"n = globals().get('n', 0) + 1; print(f'n={{n}} of={name}')"
        )
        seconds = HOSTILE_SECONDS if hostile else ORDINARY_SECONDS
        result = await self._container.run(code, wall_seconds=seconds)
        if result.state == "lost":
            self._cells = 0
            self._soak.seen["the state is reported as lost"] += 1
        elif hostile:
            self._soak.seen["hostile cell answered"] += 1
        else:
            self._cells += 1
            expected = f"n={self._cells} of={name}\n"
            if (result.exit_code, result.stdout, result.state) == (0, expected, "kept"):
                self._soak.seen["right"] += 1
            else:
                self._soak.sample("a wrong answer", f"{result}; {self.killed or 'not killed'}; expected {expected!r}")
                self._cells = 0

    async def fork(self) -> None:
        """Fork it, with what its programs have changed of the image, and make calls in the branch."""
        try:
            await self._container.end_programs()
            branch = await self._container.fork()
        except (SandboxError, ToolFault) as error:
            if self.killed:
                self._soak.seen[f"fork failed after {self.killed}"] += 1
            else:
                self._soak.sample("fork failed without a kill", str(error))
            return
        try:
            count = await branch.exec("cat n")
            if count.stdout.strip() != str(self._commands):
                self._soak.sample("a wrong branch", f"{count}; expected {self._commands}")
            self._soak.seen["forks"] += 1
        except (SandboxError, ToolFault) as error:
            self._soak.sample("a branch without a kill failed", str(error))
        finally:
            await branch.stop()


def processes_of(name: str) -> dict[str, int]:
    """The engine's command line and conmon of a container, by role."""
    found = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or []
        if name in words:
            found["conmon" if process.info["name"] == "conmon" else "command line"] = process.pid
    return found


def engine_id(conmon: int) -> str:
    """The container's number at the engine, an argument of conmon."""
    words = Path(f"/proc/{conmon}/cmdline").read_text().split("\0")
    return words[words.index("-c") + 1]


async def kill_from_outside(engine: ContainerEngine, name: str, how: str) -> None:
    """Kill a container in one of several ways."""
    if how in ("podman kill", "podman rm"):
        arguments = ["kill", name] if how == "podman kill" else ["rm", "--force", "--time", "0", name]
        await engine.run(arguments, seconds=60)
        return
    pid = processes_of(name).get(how)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


WAYS = ("command line", "conmon", "podman kill", "podman rm")


async def soak_containers(
    soak: Soak, settings: ContainerSettings, commands: int, containers: int, at_once: int, kills: int
) -> None:
    """Run all trajectories of one process."""
    pools = [ContainerPool(settings, LIMITS, warm=1), ContainerPool(_writable(settings), LIMITS, warm=0)]
    numbers = itertools.count()
    started = made = 0
    pools[0].fill()

    async def worker() -> None:
        nonlocal made, started
        while (calls := min(-(-commands // containers), commands - started)) > 0:
            number, started = next(numbers), started + calls
            writable = number % 10 == 9
            try:
                container = await pools[writable].take()
            except SandboxError as error:
                soak.sample("a container did not start", str(error))
                continue
            soak.seen["containers"] += 1
            with contextlib.suppress(OSError, KeyError, ValueError):
                conmon = processes_of(container.name)["conmon"]
                with soak.log.open("a") as file:
                    file.write(f"{container.name} {engine_id(conmon)}\n")
            trajectory = Trajectory(soak, container)
            doomed = random.random() < kills / containers
            killing = asyncio.create_task(kill(trajectory, container, number)) if doomed else None
            done = await trajectory.live(calls)
            started, made = started - calls + done, made + done
            if writable:
                await trajectory.fork()
            if killing is not None:
                await killing
            await container.stop()

    async def kill(trajectory: Trajectory, container: Container, number: int) -> None:
        await asyncio.sleep(random.random() * 6)
        trajectory.killed = WAYS[number % len(WAYS)]
        soak.seen[f"kills: {trajectory.killed}"] += 1
        await kill_from_outside(container.provider.engine, container.name, trajectory.killed)

    try:
        await asyncio.gather(*(worker() for _ in range(at_once)))
    finally:
        for pool in pools:
            await pool.close()
    soak.seen["calls"] = made


def _writable(settings: ContainerSettings) -> ContainerSettings:
    return ContainerSettings(settings.command, settings.image, writable=True, workdir="/box/work")


async def remains(engine: ContainerEngine, pids: Iterable[int], logs: Sequence[Path]) -> dict[str, list[str]]:
    """What there still is of containers of these processes."""
    owners, format = {f".{pid}." for pid in pids}, f'{{{{.ID}}}} {{{{.Names}}}} {{{{.Label "{OWNER_LABEL}"}}}}'
    listed = await engine.run(["ps", "--all", "--no-trunc", "--format", format], seconds=60)
    containers = [line for line in listed.stdout.decode().splitlines() if any(owner in line for owner in owners)]
    listed = await engine.run(["images", "--format", "{{.Repository}}:{{.Tag}}", COMMIT_REPOSITORY], seconds=60)
    images = [line for line in listed.stdout.decode().splitlines() if any(owner in line for owner in owners)]
    ids = engine_ids(logs) | {line.split()[0] for line in containers}
    return {"containers": containers, "images": images, **await asyncio.to_thread(remains_of, ids)}


def engine_ids(logs: Iterable[Path]) -> set[str]:
    """The containers that processes have noted."""
    lines = [line.split() for log in logs for line in log.read_text().splitlines()]
    return {line[1] for line in lines if len(line) == 2}


def remains_of(ids: set[str]) -> dict[str, list[str]]:
    """Processes, mounts and control groups of containers with these numbers. A control group may be without processes:
    the engine leaves some behind when conmon is killed."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        with contextlib.suppress(OSError):
            if _ids_in(words + Path(f"/proc/{process.pid}/cgroup").read_text()) & ids:
                processes.append(f"{process.pid} {words[:100]}")
    mounts = sorted(_ids_in(Path("/proc/mounts").read_text()) & ids)
    groups = (name for _, folders, _ in os.walk("/sys/fs/cgroup") for name in folders)
    left = {name for name in groups if _ids_in(name) & ids}
    return {"processes": processes, "mounts": mounts, "control groups": sorted(left)}


def _ids_in(text: str) -> set[str]:
    return set(re.findall("[0-9a-f]{64}", text))


async def settle(engine: ContainerEngine, pids: Sequence[int], folder: Path) -> dict[str, list[str]]:
    """What is left once nothing is, or after `END_SECONDS`."""
    deadline, logs = time.monotonic() + END_SECONDS, _logs(folder)
    while True:
        left = await remains(engine, pids, logs)
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(1)


def _logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


async def run(
    engine_name: str, image: str, commands: int, containers: int, at_once: int, kills: int, process_kills: int
) -> dict[str, object]:
    """All of it."""
    engine, folder = ContainerEngine(engine_name), Path(tempfile.mkdtemp(prefix="container-soak-"))
    figures: dict[str, object] = {"cores": os.cpu_count(), "load_average_before": os.getloadavg()}

    async def start(name: str, *options: str) -> asyncio.subprocess.Process:
        arguments = ("--engine", engine_name, "--image", image, "--as-worker", str(folder / name), *options)
        return await asyncio.create_subprocess_exec(sys.executable, __file__, *arguments)

    pids: list[int] = []
    begun = time.perf_counter()
    with Progress(console=console) as progress:
        task = progress.add_task("soak", total=1 + process_kills)
        options = ("--commands", commands, "--containers", containers, "--at-once", at_once, "--kills", kills)
        process = await start("all", *map(str, options))
        pids.append(process.pid)
        await process.wait()
        progress.advance(task)
        figures |= {"exit_code": process.returncode, "seconds": time.perf_counter() - begun}
        figures["left"] = await settle(engine, pids, folder)
        for number in range(process_kills):
            progress.update(task, description="killed processes")
            options = ("--commands", "10000", "--containers", "50", "--at-once", "6", "--kills", "0")
            process = await start(f"killed{number}", *options)
            pids.append(process.pid)
            await asyncio.sleep(6 + 10 * random.random())
            process.kill()
            await process.wait()
            progress.advance(task)
        figures["left_after_killed_processes"] = await settle(engine, pids, folder)
    figures["removed_as_orphans"] = await remove_orphans(engine)
    figures["left_at_the_end"] = await settle(engine, pids, folder)
    return {**_report(folder), **figures, "load_average_after": os.getloadavg()}


def _report(folder: Path) -> dict[str, object]:
    """Of the process that was not killed."""
    path = folder / "all.json"
    report: dict[str, object] = json.loads(path.read_text()) if path.exists() else {"samples": ["no report"]}
    return report


def main(
    image: Annotated[str, typer.Option(help="With bash and python3.")] = "python:3.12-slim",
    engine: Annotated[str, typer.Option(help="Container engine: docker or podman.")] = "podman",
    commands: Annotated[int, typer.Option(help="Commands and cells in all.")] = 2000,
    containers: Annotated[int, typer.Option(help="Containers in all.")] = 100,
    at_once: Annotated[int, typer.Option(help="Containers at a time.")] = 16,
    kills: Annotated[int, typer.Option(help="Containers that are killed from outside.")] = 32,
    process_kills: Annotated[int, typer.Option(help="Processes with containers that are killed.")] = 3,
    as_worker: Annotated[Path | None, typer.Option(help="For the script's own processes.", hidden=True)] = None,
    output: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")] = Path(
        "outputs/benchmarks/container_soak.json"
    ),
) -> None:
    """Run it; print the figures and write JSON."""
    if as_worker is not None:
        soak = Soak(as_worker.with_suffix(".log"))
        asyncio.run(soak_containers(soak, ContainerSettings(engine, image), commands, containers, at_once, kills))
        as_worker.with_suffix(".json").write_text(json.dumps({"seen": dict(soak.seen), "samples": soak.samples}))
        return
    figures = asyncio.run(run(engine, image, commands, containers, at_once, kills, process_kills))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(figures)


if __name__ == "__main__":
    typer.run(main)
