"""What ordinary runs get beside hostile ones: 20 clients alone, and the same beside 8 hogs of each kind.

    python benchmarks/sandbox_neighbours.py --seconds 4 --json outputs/benchmarks/sandbox_neighbours.json

The clients are measured alone before and after each kind of hog: read the ratio.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from verl_tool.sandbox import Limits, SandboxPool

CLIENTS, HOGS = 20, 8
ORDINARY = "import math\nprint(sum(range(1000)) + {n})"
_MANY = "import os, time\nfor _ in range(28):\n    if os.fork() == 0:\n        {child}\ntime.sleep(60)"
KINDS = {
    "spinners": _MANY.format(child="while True: pass"),
    "spinners, a session each": _MANY.format(child="os.setsid()\n        while True: pass"),
    "threads": "import threading\ndef f():\n    while True: pass\n"
    "for _ in range(28): threading.Thread(target=f).start()",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "short lives": "import os\nwhile True:\n    if os.fork() == 0: os._exit(0)\n    os.wait()",
    "programs": _MANY.format(child="while True: os.system('/bin/true')").replace("28", "8"),
    "memory": "import mmap\nwhile True:\n    m = mmap.mmap(-1, 1 << 30, flags=34 | 0x8000)\n    m.close()",
    "memory to the limit": "import os, time\nfor _ in range(4): os.fork()\nx = bytearray(300 << 20)\ntime.sleep(60)",
    "disk": _MANY.format(child="while True: open(f'{os.getpid()}', 'wb').write(bytes(1 << 20))").replace("28", "8"),
    "syncs": _MANY.format(child="while True: os.sync()").replace("28", "10"),
    "page cache": "import glob, os\nfs = glob.glob('/usr/lib/x86_64-linux-gnu/*.so*')\nwhile True:\n    for f in fs:\n"
    "        fd = os.open(f, 0); os.posix_fadvise(fd, 0, 0, 4); os.pread(fd, 1 << 20, 0); os.close(fd)",
    "dentries": "import os\nn = 0\nwhile True:\n    n += 1\n    try: os.stat(f'/usr/lib/{os.getpid()}{n}x')\n"
    "    except OSError: pass",
    "output": "import os\nwhile True: os.write(1, b'x' * 65536); os.lseek(1, 0, 0)",
    "signals": _MANY.format(child="while True: os.kill(os.getpid(), 0); os.kill(os.getppid(), 18)"),
}


@dataclass(frozen=True)
class Row:
    """One kind of hog."""

    kind: str
    alone: float
    """Runs a second of all clients together, the mean of before and after."""
    beside: float
    wrong: int
    """Runs that did not give what they should."""
    ratio: float


async def _rate(pool: SandboxPool, seconds: float) -> tuple[float, int]:
    begun = time.monotonic()
    done = wrong = 0

    async def client(number: int) -> None:
        nonlocal done, wrong
        while time.monotonic() - begun < seconds:
            number += CLIENTS
            result = await pool.run(ORDINARY.format(n=number))
            done, wrong = done + 1, wrong + (result.stdout != f"{499500 + number}\n")

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return done / (time.monotonic() - begun), wrong


async def _beside(pool: SandboxPool, kind: str, seconds: float) -> Row:
    before, _ = await _rate(pool, seconds / 2)
    limits = Limits(wall_seconds=seconds + 2)
    hogs = [asyncio.create_task(pool.run(KINDS[kind], limits=limits)) for _ in range(HOGS)]
    await asyncio.sleep(1.5)
    rate, wrong = await _rate(pool, seconds)
    for hog in hogs:
        hog.cancel()
    await asyncio.gather(*hogs, return_exceptions=True)
    after, _ = await _rate(pool, seconds / 2)
    alone = (before + after) / 2
    return Row(kind, alone, rate, wrong, rate / alone)


async def compare(seconds: float, kinds: list[str]) -> list[Row]:
    """A row for each kind, in one pool."""
    async with SandboxPool() as pool:
        await _rate(pool, 1.0)
        return [await _beside(pool, kind, seconds) for kind in kinds]


def main(
    seconds: Annotated[float, typer.Option(help="Seconds per measurement.")] = 4.0,
    kinds: Annotated[str, typer.Option(help="Kinds of hogs, separated by semicolons; all by default.")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Measure and print."""
    rows = asyncio.run(compare(seconds, kinds.split(";") if kinds else list(KINDS)))
    table = Table("hogs", "alone, runs/s", "beside, runs/s", "ratio", "wrong", title=f"{CLIENTS} clients, {HOGS} hogs")
    for row in rows:
        table.add_row(row.kind, f"{row.alone:.0f}", f"{row.beside:.0f}", f"{row.ratio:.2f}", str(row.wrong))
    Console().print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    typer.run(main)
