"""Steps a second of our tools under OpenEnv's client, beside environments that openenv itself serves.

    bash scripts/install_peers.sh .peers
    python benchmarks/environments_served.py --peers .peers --json outputs/benchmarks/environments_served.json

All are played by openenv's `GenericEnvClient` in a process of its own. Ours are the tools `calculator` and
`python_code` of a tool server (one process, ``--embedded``) behind ``python -m verl_tool.environments serve openenv``,
and the same tool server called by `ToolClient` without the adapter. openenv's are an environment that echoes,
one with a tool of fastmcp, and its PyExecutor. That runs code in the server's process; `python_code` runs each step in
an interpreter of its own within the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.load import percentile, usage_of_tree
from verl_tool.client import ToolClient
from verl_tool.protocol import DIRECT_FIELD
from verl_tool.servers.serve.ports import free_ports

PEER = Path(__file__).with_name("openenv_peer.py")
START_SECONDS = 120.0
CODE = "print(6 * 7)"


@dataclass(frozen=True)
class ServedCell:
    """One measurement."""

    name: str
    sessions: int
    steps_a_second: float
    median_ms: float
    p99_ms: float
    cpu_ms: float
    """CPU time a step of the process that speaks the protocol: the adapter alone, or all of openenv's server. NaN for
    calls without an adapter."""
    load: float
    """Of the machine over the last minute, when the measurement began."""


@contextmanager
def running(command: Sequence[str], url: str, log: Path) -> Iterator[int]:
    """Run a server within the block, from when it answers ``/health``. Yields its process id."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)} does not serve:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def cell_of(
    name: str, sessions: int, load: float, seconds: float, milliseconds: Sequence[float], cpu_ms: float = math.nan
) -> ServedCell:
    rate, median = len(milliseconds) / seconds, statistics.median(milliseconds)
    return ServedCell(name, sessions, rate, median, percentile(milliseconds, 0.99), cpu_ms, load)


def play(
    python: Path, name: str, url: str, pid: int, action: Mapping[str, Any], sessions: int, seconds: float
) -> ServedCell:
    """Measure an environment, whose server is the process `pid`, with openenv's client."""
    load, cpu = os.getloadavg()[0], usage_of_tree([pid]).cpu_seconds
    command = [str(python), str(PEER), "play", url, json.dumps(action), str(sessions), str(seconds)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=seconds + START_SECONDS, check=False)
    if run.returncode:
        raise SystemExit(f"{name}: {run.stderr[-2000:]}")
    played = json.loads(run.stdout.splitlines()[-1])
    steps = played["warm_up"] + len(played["milliseconds"])
    cpu_ms = 1e3 * (usage_of_tree([pid]).cpu_seconds - cpu) / steps
    return cell_of(name, sessions, load, played["seconds"], played["milliseconds"], cpu_ms)


async def call_directly(url: str, name: str, arguments: Mapping[str, Any], sessions: int, seconds: float) -> ServedCell:
    """Measure the tool server without an adapter."""
    load, milliseconds = os.getloadavg()[0], []
    action = json.dumps({"name": name, "arguments": arguments})

    async def step(client: ToolClient, until: float, counts: bool) -> None:
        count, trajectory = 0, secrets.token_hex(8)  # a repeated step would be answered from its record
        while time.perf_counter() < until:
            began = time.perf_counter()
            await client.call(trajectory, action, step=count, extra={DIRECT_FIELD: True})
            count += 1
            if counts:
                milliseconds.append(1e3 * (time.perf_counter() - began))

    async with ToolClient(url) as client:
        for counts, length in ((False, 1.0), (True, seconds)):
            began = time.perf_counter()
            await asyncio.gather(*(step(client, began + length, counts) for _ in range(sessions)))
        passed = time.perf_counter() - began
    return cell_of(f"{name}, ToolClient", sessions, load, passed, milliseconds)


def call_tool(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


def main(
    peers: Annotated[Path, typer.Option(help="The folder of scripts/install_peers.sh.")],
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement, after one second to warm up.")] = 5.0,
    sessions: Annotated[str, typer.Option(help="Numbers of sessions, separated by commas.")] = "1,8",
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure all, one after the other."""
    python = peers / "openenv" / "bin" / "python"
    counts, cells = [int(each) for each in sessions.split(",")], []
    ours = {"calculator": {"expression": "6*7"}, "python_code": {"code": CODE}}
    theirs = {"echo": {"text": CODE}, "tool": call_tool("echo", text=CODE), "python": {"text": CODE}}
    names = {"echo": "openenv: echo", "tool": "openenv: a tool of fastmcp", "python": "openenv: PyExecutor"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder)
        server, adapter, *ports = (f"http://127.0.0.1:{port}" for port in free_ports(2 + len(theirs)))
        tools = ("--embedded", "--tool_type", ",".join(ours), "--port", server.rpartition(":")[2])
        front = ("serve", "openenv", "--tool_server", server, "--port", adapter.rpartition(":")[2])
        with (
            running([sys.executable, "-m", "verl_tool.servers.ray_serve", *tools], server, log / "server"),
            running([sys.executable, "-m", "verl_tool.environments", *front], adapter, log / "adapter") as pid,
        ):
            for name, arguments in ours.items():
                for count in counts:
                    cells.append(play(python, name, adapter, pid, call_tool(name, **arguments), count, seconds))
                    cells.append(asyncio.run(call_directly(server, name, arguments, count, seconds)))
        for (kind, action), url in zip(theirs.items(), ports, strict=True):
            with running([str(python), str(PEER), "serve", kind, url.rpartition(":")[2]], url, log / kind) as pid:
                cells += [play(python, names[kind], url, pid, action, count, seconds) for count in counts]
    table = Table("environment", "sessions", "steps/s", "median ms", "p99 ms", "CPU ms", "load")
    for cell in cells:
        figures = (cell.steps_a_second, cell.median_ms, cell.p99_ms, cell.cpu_ms, cell.load)
        table.add_row(cell.name, str(cell.sessions), *(f"{figure:.2f}" for figure in figures))
    Console(width=120).print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"cells": [asdict(cell) for cell in cells], "cpus": os.cpu_count()}, indent=1))


if __name__ == "__main__":
    typer.run(main)
