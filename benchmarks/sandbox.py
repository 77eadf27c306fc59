"""The sandbox against a fresh Python for every call, which is what most tool servers do and isolates nothing.

    python benchmarks/sandbox.py --seconds 5 --json outputs/benchmarks/sandbox.json

`subprocess` is ``python -c``; `subprocess -I` is ``python -I -c``, which skips the user's own settings.
Ways take turns on every snippet and concurrency, so that a noisy machine is noisy to all of them: read the ratios, and
CPU per run, which depends least on what else goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from load import Call, Cell, measure, print_cells, with_ratios
from rich.console import Console

from verl_tool.sandbox import WARM_MODULES, SandboxPool

SNIPPETS = {
    "print": "print(1 + {n})",
    "numpy": "import numpy as np\nprint(np.arange({n} + 2).max())",
    "sympy": "import sympy\nprint(sympy.solve(sympy.Symbol('x') - {n} - 1)[0])",
}
"""Each prints its number plus one."""


def in_subprocess(snippet: str, *options: str) -> Call:
    """A fresh interpreter for each call."""

    async def call(number: int) -> int:
        code = SNIPPETS[snippet].format(n=number)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *options, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
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


async def compare(seconds: float, levels: list[int], warm: tuple[str, ...]) -> tuple[list[Cell], str]:
    """Every way, snippet and concurrency; and the isolation that was in force."""
    cells: list[Cell] = []
    async with SandboxPool(warm_modules=warm) as pool:
        for snippet in SNIPPETS:
            ways = {
                "subprocess": in_subprocess(snippet),
                "subprocess -I": in_subprocess(snippet, "-I"),
                "sandbox": in_pool(pool, snippet),
            }
            for level in levels:
                for system, call in ways.items():
                    await call(0)
                    cells.append(
                        await measure(
                            call,
                            system=system,
                            snippet=snippet,
                            concurrency=level,
                            seconds=seconds,
                            pids=[os.getpid()],
                        )
                    )
        return with_ratios(cells, "subprocess"), pool.level.describe()


def main(
    seconds: Annotated[float, typer.Option(help="Seconds per measurement.")] = 5.0,
    levels: Annotated[str, typer.Option(help="Runs at once, separated by commas.")] = "1,8,64",
    warm: Annotated[str, typer.Option(help="Modules that the sandbox imports once, separated by commas.")] = ",".join(
        WARM_MODULES
    ),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the cells here.")] = None,
) -> None:
    """Measure and print."""
    modules = tuple(name for name in warm.split(",") if name)
    cells, isolation = asyncio.run(compare(seconds, [int(level) for level in levels.split(",")], modules))
    print_cells(cells, f"Sandbox ({isolation})")
    Console().print(f"warm: {', '.join(modules) or 'nothing'}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        document = {"isolation": isolation, "warm": modules, "cells": [asdict(cell) for cell in cells]}
        json_path.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    typer.run(main)
