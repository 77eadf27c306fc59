"""The tool server against a plain Python subprocess per call, in one run: `python benchmarks/served_tools.py`.

Systems: `subprocess` (a new Python per call, no isolation: what most tool servers do), `sandbox` (the pool alone),
`server` (HTTP, one call a request), `server x64` (HTTP, 64 trajectories a request). A no-op tool is compared with
uvicorn + FastAPI beside it. Last comes a soak: thousands of calls at concurrency 256, 5% of them hostile, every answer
checked.

Ratios are what to read. The systems take turns, `--rounds` times each, back and forth. Each round gives a ratio, and
their median is told with the lowest and the highest; the other figures are those of the round with the median
throughput.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import typer
from load import Call, Cell, Usage, in_turn, markdown, measure, print_cells, usage_of_tree, with_ratios, write_json
from rich.console import Console

from verl_tool.sandbox import Limits, SandboxPool
from verl_tool.servers.serve.ports import free_ports

console = Console(stderr=True)

SNIPPETS = {
    "print": "print(1 + {n})",
    "numpy": "import numpy as np\nprint(np.arange({n} + 2).max())",
}
"""Each prints its number plus one."""
HOSTILE = [
    "while True: pass",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "x = []\nwhile True: x.append(bytearray(10_000_000))",
    "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "import sys\nwhile True: sys.stdout.write('x' * 100_000)",
    "import ctypes; ctypes.string_at(0)",
    "i = 0\nwhile True:\n    open(f'/tmp/{i}', 'wb').write(b'a' * (1 << 20)); i += 1",
]
NOOP_TOOL = """
from verl_tool.servers.tools.base import Tool, ToolResult


class Noop(Tool):
    name = "noop"
    description = "Answers at once."
    example_actions = ("<noop>1</noop>",)

    async def run(self, call, context):
        return ToolResult(call.input)
"""
FASTAPI_NOOP = """
import sys
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class Request(BaseModel):
    trajectory_ids: list[str]
    actions: list[str]


app = FastAPI()


@app.post("/get_observation")
async def get_observation(request: Request) -> dict:
    n = len(request.actions)
    return {"observations": request.actions, "dones": [False] * n, "valids": [True] * n}


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


async def wait_until_up(url: str, process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    """Raises RuntimeError if `process` ends or does not answer in time."""
    deadline = time.monotonic() + seconds
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {process.returncode}")
            try:
                async with session.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, asyncio.TimeoutError):
                pass  # not yet
            await asyncio.sleep(0.3)
    raise RuntimeError(f"no answer from {url} within {seconds} s")


@asynccontextmanager
async def running(command: list[str], url: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A child process that serves `url`; stopped with SIGINT, killed if it does not go."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        await wait_until_up(url, process)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            await asyncio.to_thread(process.wait, 60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def server_command(port: int, tools: str, queue: int = 4096) -> list[str]:
    command = [sys.executable, "-m", "verl_tool.servers.ray_serve", "--port", str(port), "--tool_type", tools]
    return [*command, "--max_concurrent_requests", str(queue)]


def text_of(observation: str | dict) -> str:
    """The text of an observation in either of its wire forms."""
    return observation if isinstance(observation, str) else observation["obs"]


class Connections:
    """Open connections to one server, each for one request at a time.

    The load generator shares the machine with what it measures, and a whole HTTP client takes as much CPU for a request
    as the server does.
    """

    def __init__(self, url: str, path: str = "/get_observation") -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._address = (host, int(port))
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        self._head = head.encode()
        self.bytes = 0
        """Of all bodies that were sent and received."""

    async def get_observation(self, ids: list[str], actions: list[str]) -> list[str | dict]:
        """The observations. Raises RuntimeError for an answer other than 200."""
        return (await self.post({"trajectory_ids": ids, "actions": actions}))["observations"]

    async def post(self, body: dict) -> dict:
        """The answer. Raises RuntimeError for one other than 200."""
        sent = json.dumps(body).encode()
        reader, writer = await self._connection()
        writer.write(self._head + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = re.search(rb"\r\ncontent-length: *(\d+)", head)
        if length is None:
            raise RuntimeError(f"an answer without a length: {head!r}")
        answer = await reader.readexactly(int(length[1]))
        self.bytes += len(sent) + len(answer)
        self._idle.append((reader, writer))
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"{head.splitlines()[0].decode()}: {answer[:200]!r}")
        return json.loads(answer)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(*self._address)

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *_: object) -> None:
        for _, writer in self._idle:
            writer.close()
            await writer.wait_closed()


def get_observation(connections: Connections, snippet: str, batch: int = 1):
    """A call for `measure`: `batch` trajectories a request, each answer checked against its own number."""

    async def call(number: int) -> int:
        numbers = range(number * batch, number * batch + batch)
        actions = [f"```python\n{SNIPPETS[snippet].format(n=n)}\n```" for n in numbers]
        observations = await connections.get_observation([f"{snippet}-{batch}-{n}" for n in numbers], actions)
        return sum(str(n + 1) in text_of(obs).split() for n, obs in zip(numbers, observations, strict=True))

    return call


def in_subprocess(snippet: str) -> Call:
    """A fresh interpreter for each call."""

    async def call(number: int) -> int:
        code = SNIPPETS[snippet].format(n=number)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        return int(out.split() == [str(number + 1).encode()])

    return call


def in_pool(pool: SandboxPool, snippet: str) -> Call:
    """A run in the sandbox for each call."""

    async def call(number: int) -> int:
        result = await pool.run(SNIPPETS[snippet].format(n=number))
        return int(result.stdout.split() == [str(number + 1)])

    return call


async def compare_executions(seconds: float, levels: list[int], rounds: int) -> tuple[list[Cell], list[Cell]]:
    """`print` and numpy at every concurrency, all systems in turn; and in batches."""
    cells: list[Cell] = []
    batches: list[Cell] = []
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    own = [os.getpid()]
    async with (
        running(server_command(port, "python_code"), url + "/health") as server,
        Connections(url) as front,
        SandboxPool(max_concurrent=256) as pool,
    ):
        for snippet in SNIPPETS:
            await asyncio.gather(in_pool(pool, snippet)(0), get_observation(front, snippet)(0))
            for level in levels:
                systems = {
                    "subprocess": (in_subprocess(snippet), own),
                    "sandbox": (in_pool(pool, snippet), own),
                    "server": (get_observation(front, snippet), [server.pid]),
                }
                console.print(f"[dim]{snippet:6} {level:4} at once: {', '.join(systems)}[/]")
                measurements = [
                    partial(
                        measure, call, system=system, snippet=snippet, concurrency=level, seconds=seconds,
                        pids=pids, without=[] if pids == [server.pid] else [server.pid],
                    )
                    for system, (call, pids) in systems.items()
                ]  # fmt: skip
                cells += await in_turn(measurements, rounds, "subprocess")
            batches += await compare_batches(pool, front, snippet, 2 * seconds, rounds, server.pid)
    return cells, batches


async def compare_batches(
    pool: SandboxPool, front: Connections, snippet: str, seconds: float, rounds: int, server_pid: int
) -> list[Cell]:
    """Requests of 64 trajectories, two at a time, against the pool kept as busy: listed at 128 at once."""
    console.print(f"[dim]{snippet:6} batches[/]")

    async def batches() -> Cell:
        cell = await measure(
            get_observation(front, snippet, 64), system="server x64", snippet=snippet, concurrency=2,
            seconds=seconds, executions_per_call=64, pids=[server_pid],
        )  # fmt: skip
        return replace(cell, concurrency=128)

    alone = partial(
        measure, in_pool(pool, snippet), system="sandbox", snippet=snippet, concurrency=128, seconds=seconds,
        pids=[os.getpid()], without=[server_pid],
    )  # fmt: skip
    return await in_turn([alone, batches], rounds, "sandbox")


async def time_limits(seconds: float) -> list[Cell]:
    """A loop that never ends, limit 1 s, 8 at once: how late is the end?"""

    async def in_sandbox(number: int) -> int:
        return int((await pool.run("while True: pass")).timed_out)

    async def in_subprocess(number: int) -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
        try:
            await asyncio.wait_for(process.wait(), 1.0)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
            return 1
        return 0

    async with SandboxPool(limits=Limits(wall_seconds=1.0)) as pool:
        cells = []
        for system, call in (("subprocess", in_subprocess), ("sandbox", in_sandbox)):
            pids, snippet = [os.getpid()], "loop, limit 1 s"
            cells.append(await measure(call, system=system, snippet=snippet, concurrency=8, seconds=seconds, pids=pids))
        return with_ratios(cells, "subprocess")


async def compare_noop(seconds: float, levels: list[int], rounds: int) -> list[Cell]:
    """Our whole server with a tool that does nothing, against uvicorn + FastAPI that does nothing."""
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        tool, app = Path(folder) / "noop.py", Path(folder) / "fastapi_noop.py"
        tool.write_text(NOOP_TOOL)
        app.write_text(FASTAPI_NOOP)
        ours, theirs = free_ports(2)
        async with (
            running(server_command(ours, str(tool)), f"http://127.0.0.1:{ours}/health") as server,
            running([sys.executable, str(app), str(theirs)], f"http://127.0.0.1:{theirs}/docs") as fastapi,
        ):
            systems = {
                "uvicorn + FastAPI": (f"http://127.0.0.1:{theirs}", fastapi.pid),
                "server": (f"http://127.0.0.1:{ours}", server.pid),
            }
            for level in levels:
                measurements = [
                    partial(measure_noop, system, url, pid, level, seconds) for system, (url, pid) in systems.items()
                ]
                cells += await in_turn(measurements, rounds, "uvicorn + FastAPI")
    return cells


async def measure_noop(system: str, url: str, pid: int, level: int, seconds: float) -> Cell:
    async with Connections(url) as connections:

        async def call(number: int) -> int:
            observations = await connections.get_observation([f"t{number}"], [f"<noop>{number}</noop>"])
            return int(str(number) in text_of(observations[0]))

        console.print(f"[dim]no-op {level:4} at once: {system}[/]")
        await asyncio.gather(*[call(n) for n in range(level)])
        return await measure(call, system=system, snippet="no-op", concurrency=level, seconds=seconds, pids=[pid])


async def soak(calls: int) -> dict[str, object]:
    """`calls` at concurrency 256, 5% hostile: is every answer the one asked for, does anything grow?"""
    config = Path(tempfile.mkdtemp()) / "config.json"
    config.write_text('{"tools": {"python_code": {"timeout_seconds": 2}}}')
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [*server_command(port, "python_code"), "--tool_config", str(config)]
    async with (
        running(command, url + "/health") as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        await soak_part(session, url, calls // 10)
        await asyncio.sleep(3)
        before = usage_of_tree([server.pid])
        started = time.perf_counter()
        counts = await soak_part(session, url, calls)
        seconds = time.perf_counter() - started
        await asyncio.sleep(3)
        after = usage_of_tree([server.pid])
    return {**counts, "seconds": round(seconds, 1), **growth(before, after)}


def growth(before: Usage, after: Usage) -> dict[str, object]:
    return {
        "processes_before": before.processes,
        "processes_after": after.processes,
        "memory_mb_before": round(before.memory_bytes / 2**20),
        "memory_mb_after": round(after.memory_bytes / 2**20),
    }


async def soak_part(session: aiohttp.ClientSession, url: str, calls: int) -> dict[str, int]:
    """Every 20th call is hostile; each of the others must be answered with its own number."""
    gate = asyncio.Semaphore(256)
    counts = {"calls": calls, "hostile": 0, "lost": 0, "crossed": 0}

    async def one(number: int) -> None:
        hostile = number % 20 == 0
        code = HOSTILE[number // 20 % len(HOSTILE)] if hostile else f"print('answer', {number})"
        body = {"trajectory_ids": [f"soak-{number}"], "actions": [f"```python\n{code}\n```"]}
        async with gate, session.post(url + "/get_observation", json=body) as response:
            answer = await response.json()
        counts["hostile"] += hostile
        text = text_of(answer.get("observations", [""])[0])
        if not hostile and f"answer {number}" not in text:
            counts["crossed" if "answer" in text else "lost"] += 1

    await asyncio.wait_for(asyncio.gather(*[one(n) for n in range(calls)]), 900)
    return counts


def main(
    seconds: float = typer.Option(2.0, help="How long a round keeps a cell busy."),
    rounds: int = typer.Option(5, min=1, help="How often each cell is measured; the median counts."),
    concurrency: str = typer.Option("1,8,64,256", help="Calls at once, comma separated."),
    soak_calls: int = typer.Option(10_000, help="Calls of the soak; 0 leaves it out."),
    output: Path = typer.Option(Path("outputs/benchmarks/served_tools.json"), help="Where the figures go, as JSON."),
) -> None:
    """Measure the tool server; print tables, write JSON and Markdown."""
    levels = [int(level) for level in concurrency.split(",")]
    cells, batches = asyncio.run(compare_executions(seconds, levels, rounds))
    print_cells(cells, "Running code: against a new Python process per call")
    print_cells(batches, "Batches of 64: against the sandbox alone")
    limits = asyncio.run(time_limits(6.0))
    print_cells(limits, "A loop to the time limit")
    noop = asyncio.run(compare_noop(seconds, levels, rounds))
    print_cells(noop, "A tool that does nothing: against uvicorn + FastAPI")
    facts: dict[str, object] = {}
    if soak_calls:
        facts["soak"] = asyncio.run(soak(soak_calls))
        Console().print("Soak:", facts["soak"])
    parts = (cells, batches, limits, noop)
    write_json(output, [cell for part in parts for cell in part], **facts)
    output.with_suffix(".md").write_text("\n\n".join(map(markdown, parts)) + "\n")
    console.print(f"figures: {output}, table: {output.with_suffix('.md')}")


if __name__ == "__main__":
    typer.run(main)
