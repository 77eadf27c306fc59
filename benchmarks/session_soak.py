"""Many calls of sessions over HTTP, some of them hostile, while forkservers are killed: is anything lost silently?

    python benchmarks/session_soak.py --calls 10000 --sessions 500

Each trajectory has a Python state and a shell. In both it counts its calls and keeps its own name, and it keeps that in
a file too; every answer is checked. A hostile call may harm its own trajectory, and what is lost must be told: by a
fault, or in words in an observation. At the end no process, file or control group may be left.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import typer
from load import family_of, memory_of_tree, pids_by_namespace
from rich.console import Console
from served_tools import HOSTILE, Connections, running, server_command

from verl_tool.servers.serve.ports import free_ports

HOSTILE_SHELL = [
    "while :; do :; done",
    ":(){ :|:& };:",
    "kill -9 -1",
    "yes",
    "exec 0<&- 1>&- 2>&-",
    "trap '' INT TERM QUIT; sleep 1000",
    "head -c 1G /dev/zero > big",
]
BEGIN = {
    "python": "me = 'NAME'; n = 0; open('me', 'w').write(me)",
    "bash": "me=NAME; n=0; printf '%s\\n' \"$me\" > shell",
}
COUNT = {
    "python": "n += 1; print(f'n={n} of={me} file={open(\"me\").read()}')",
    "bash": 'n=$((n + 1)); read -r file < shell; echo "n=$n of=$me file=$file"',
}
TOLD = re.compile(r"All variables are lost|a new one has started")
"""What an observation says of a state that is gone."""
KEPT_FAULTS = ("overloaded",)
"""Kinds of faults after which the call has not run, and the state is as before."""
AT_ONCE = 64
CALL_SECONDS = 2.0
ANSWER_SECONDS = 120.0
END_SECONDS = 30.0
GROUPS = re.compile(r"verl-tool-[0-9a-f]{16}-[0-9a-f]{12}")

console = Console(stderr=True)


@dataclass
class Trajectory:
    """What it should find in its next call."""

    id: str = field(default_factory=lambda: f"soak-{uuid.uuid4().hex}")
    counts: dict[str, int] = field(default_factory=dict)
    """Calls so far, by language; without an entry there is no state yet."""
    harmed: bool = False
    """It has made a hostile call: it may find itself without room, processes or a working terminal."""


@dataclass
class Soak:
    """The trajectories of one server, and what became of their calls."""

    connections: Connections
    pid: int
    """Of the server."""
    trajectories: deque[Trajectory]
    killed: int = 0
    """Forkservers."""
    seen: Counter[str] = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)
    """Of answers that were neither right nor told of a loss."""

    async def run(self, calls: int, hostile_every: int, kills: int) -> None:
        """Make the calls, `AT_ONCE` at a time, and kill forkservers meanwhile."""
        numbers = iter(range(calls))
        kill_at = {int((part + random.random()) * calls / kills) for part in range(kills)}

        async def worker() -> None:
            for number in numbers:
                if number in kill_at:
                    self.killed += kill_one(self.pid)
                trajectory = self.trajectories.popleft()
                kept = await self.call(trajectory, number, hostile=number % hostile_every == hostile_every - 1)
                self.trajectories.append(trajectory if kept else Trajectory())

        await asyncio.gather(*(worker() for _ in range(min(AT_ONCE, len(self.trajectories)))))

    async def call(self, trajectory: Trajectory, number: int, hostile: bool) -> bool:
        """Make one call. Returns whether the trajectory goes on: not after a fault."""
        language = ("python", "bash")[random.randrange(2)]
        if hostile:
            code = (HOSTILE if language == "python" else HOSTILE_SHELL)[number // 20 % 7]
        else:
            code = COUNT[language]
            if language not in trajectory.counts:
                code = BEGIN[language].replace("NAME", trajectory.id) + "\n" + code
        request = {"trajectory_ids": [trajectory.id], "actions": [f"<{language}>{code}</{language}>"]}
        try:
            answer = await asyncio.wait_for(self.connections.post(request), ANSWER_SECONDS)
        except (OSError, EOFError, RuntimeError, ValueError, asyncio.TimeoutError) as error:
            self.seen[f"no answer: {type(error).__name__}"] += 1
            self.sample(trajectory, language, repr(error))
            return False
        fault = (answer.get("faults") or [None])[0]
        if fault:
            self.seen[f"fault {fault['kind']}"] += 1
            if fault["kind"] not in ("state_lost", *KEPT_FAULTS):
                self.sample(trajectory, language, str(fault))
            return fault["kind"] in KEPT_FAULTS
        self.judge(trajectory, language, str(answer["observations"][0]), hostile)
        return True

    def judge(self, trajectory: Trajectory, language: str, text: str, hostile: bool) -> None:
        """Count what an observation shows."""
        told = TOLD.search(text) is not None
        expected = trajectory.counts.get(language, 0) + 1
        ids = set(re.findall(r"soak-[0-9a-f]{32}", text))
        right = f"n={expected} of={trajectory.id} file={trajectory.id}" in text
        if ids - {trajectory.id}:
            self.seen["crossed"] += 1
            self.sample(trajectory, language, text)
        elif hostile:
            self.seen["hostile"] += 1
            trajectory.harmed = True
        elif right:
            self.seen["right"] += 1
        elif told:
            self.seen["told of a loss"] += 1
        elif trajectory.harmed and set(re.findall(r"n=(\d+)", text)) <= {str(expected)}:
            self.seen["an error after harm of its own"] += 1
        else:
            self.seen["lost silently"] += 1
            self.sample(trajectory, language, text)
        if told:
            trajectory.counts.pop(language, None)
        elif right:
            trajectory.counts[language] = expected

    def sample(self, trajectory: Trajectory, language: str, text: str) -> None:
        """Keep the first few."""
        if len(self.samples) < 20:
            state = f"{language}, {trajectory.counts}, harmed: {trajectory.harmed}"
            self.samples.append(f"{state}: {text[:300]}")

    async def finish(self) -> None:
        """End all trajectories."""
        ids = [trajectory.id for trajectory in self.trajectories]
        for begin in range(0, len(ids), AT_ONCE):
            some = ids[begin : begin + AT_ONCE]
            body = {"trajectory_ids": some, "actions": [""] * len(some), "finish": [True] * len(some)}
            await self.connections.post(body)


def forkservers(pid: int) -> list[int]:
    """Those below `pid` in which sessions live."""
    family = [(member, pids_by_namespace(member)) for member in family_of([pid])]
    parents = {psutil.Process(member).ppid() for member, inside in family if len(inside) > 2 and inside[-1] == 1}
    return sorted(parents)


def in_sessions(pid: int) -> int:
    """Processes of sessions below `pid`."""
    return sum(len(pids_by_namespace(member)) > 2 for member in family_of([pid]))


def kill_one(pid: int) -> int:
    """Kill a forkserver below `pid` that holds sessions. Returns how many were killed."""
    victims = forkservers(pid)
    if victims:
        os.kill(random.choice(victims), signal.SIGKILL)
    return min(1, len(victims))


def until_none(count: Callable[[], int]) -> int:
    """What `count` gives once it is 0, or after `END_SECONDS`."""
    deadline = time.monotonic() + END_SECONDS
    while (left := count()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def orphans() -> int:
    """Live processes that the server left."""
    children = psutil.Process().children(recursive=True)
    return sum(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def adopt_orphans() -> None:
    """What the server's processes leave behind becomes a child of this process (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    if ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def own_groups(pid: int) -> set[str]:
    """Names of the control groups in which the server's forkservers are."""
    found: set[str] = set()
    for member in family_of([pid]):
        try:
            found.update(GROUPS.findall(Path(f"/proc/{member}/cgroup").read_text()))
        except OSError:
            continue
    return found


def groups_left(names: set[str]) -> int:
    """Control groups with these names that there still are."""
    return sum(name[:39] in names for place in Path("/sys/fs/cgroup").glob("*") for name in _names(place))


def _names(place: Path) -> list[str]:
    return [place.name, *(entry.name for entry in place.iterdir() if entry.is_dir())] if place.is_dir() else []


async def run(calls: int, sessions: int, hostile_every: int, kills: int) -> dict[str, object]:
    """All of it."""
    adopt_orphans()
    folder = tempfile.mkdtemp(prefix="s-", dir="/tmp")
    config = Path(tempfile.mkdtemp()) / "config.json"
    shared = {"max_sessions": 2 * sessions, "max_memory_mb": 256, "timeout_seconds": CALL_SECONDS}
    config.write_text(json.dumps({"tools": {"ipython_code": shared, "bash_terminal": shared}}))
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = ["env", f"TMPDIR={folder}", *server_command(port, "ipython_code,bash_terminal")]
    figures: dict[str, object] = {"load_average_before": os.getloadavg()}
    async with (
        running([*command, "--tool_config", str(config)], url + "/health") as server,
        Connections(url) as connections,
    ):
        soak = Soak(connections, server.pid, deque(Trajectory() for _ in range(sessions)))
        begun = time.perf_counter()
        await soak.run(calls, hostile_every, kills)
        figures |= {"seconds": time.perf_counter() - begun, "forkservers_killed": soak.killed}
        figures["gib_with_sessions"] = memory_of_tree([server.pid]) / 2**30
        groups = own_groups(server.pid)
        await soak.finish()
        figures["processes_of_sessions_left"] = until_none(lambda: in_sessions(server.pid))
    figures["processes_left"] = until_none(orphans)
    figures["groups"], figures["groups_left"] = len(groups), groups_left(groups)
    figures["files_left"] = [name for name in os.listdir(folder) if not name.startswith("verl-tool-")]
    shutil.rmtree(folder)
    counted = {"crossed": 0, "lost silently": 0, **soak.seen}
    return {"calls": calls, "sessions": sessions, **counted, **figures, "samples": soak.samples}


def main(
    calls: Annotated[int, typer.Option(help="Calls in all.")] = 10_000,
    sessions: Annotated[int, typer.Option(help="Trajectories at a time.")] = 500,
    hostile_every: Annotated[int, typer.Option(min=2, help="One call in so many is hostile.")] = 20,
    kills: Annotated[int, typer.Option(help="Forkservers to kill.")] = 4,
    output: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")] = Path(
        "outputs/benchmarks/session_soak.json"
    ),
) -> None:
    """Run it; print the figures and write JSON."""
    figures = asyncio.run(run(calls, sessions, hostile_every, kills))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(figures)


if __name__ == "__main__":
    typer.run(main)
