"""Solutions a second of the judge and of verl's `prime_code`, by the number of tests on stdin.

    python benchmarks/judge_throughput.py
    python benchmarks/judge_throughput.py --before /path/to/another/checkout

Each round measures all of them one after the other, `at_once` solutions at a time, and the table has the medians of
the rounds. `--before` measures the judge of another checkout in the same rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

SOLUTION = """
import sys
from collections import defaultdict
n = int(input())
counts = defaultdict(int)
for value in map(int, input().split()):
    counts[value] += 1
print(sum(counts.values()))
"""


def pairs(tests: int) -> dict[str, list[str]]:
    return {"inputs": [f"3\n1 2 {i}\n" for i in range(tests)], "outputs": ["3\n"] * tests}


async def judge_rates(sizes: list[int], solutions: int, at_once: int) -> list[float]:
    """Solutions a second of the judge that is importable, for each number of tests. Raises RuntimeError."""
    from verl_tool.judge.code_tests import JudgeRun, judge_modules, suite_in
    from verl_tool.sandbox import Limits, SandboxPool

    async with SandboxPool(workers=1) as pool:
        places = asyncio.Semaphore(at_once)

        async def judged(tests: int) -> None:
            async with places:
                run = JudgeRun.of(SOLUTION, suite_in(pairs(tests), tests), 30.0, 300.0)
                ran = await pool.run(
                    run.code, stdin=run.stdin, files=judge_modules(), limits=Limits(wall_seconds=320.0)
                )
                if run.read(ran.stdout, ran.stderr, f"exit code {ran.exit_code}").pass_rate < 1:
                    raise RuntimeError("a right solution failed; the machine is too busy to measure on")

        await judged(1)
        rates = []
        for tests in sizes:
            begun = time.monotonic()
            await asyncio.gather(*(judged(tests) for _ in range(solutions)))
            rates.append(solutions / (time.monotonic() - begun))
        return rates


def prime_code_rates(sizes: list[int], solutions: int, at_once: int) -> list[float]:
    """The same of `prime_code`."""
    from verl.utils.reward_score import prime_code

    def judged(tests: int) -> None:
        if prime_code.compute_score(f"```python\n{SOLUTION}\n```", json.dumps(pairs(tests)))[0] is not True:
            raise RuntimeError("prime_code failed a right solution; the machine is too busy to measure on")

    rates = []
    with ThreadPoolExecutor(at_once) as pool, contextlib.redirect_stdout(io.StringIO()):
        for tests in sizes:
            begun = time.monotonic()
            list(pool.map(judged, [tests] * solutions))
            rates.append(solutions / (time.monotonic() - begun))
    return rates


def in_process(kind: str, checkout: Path, arguments: list[str]) -> list[float]:
    """One measurement in a process of its own, with the package of `checkout`."""
    command = [sys.executable, __file__, "--measure", kind, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{kind} failed: {ran.stderr[-500:]}")
    return list(json.loads(ran.stdout.splitlines()[-1]))


def main(
    sizes: Annotated[str, typer.Option(help="Numbers of tests.")] = "10,50,100",
    solutions: Annotated[int, typer.Option(help="Of each size, in each round.")] = 8,
    at_once: Annotated[int, typer.Option(help="Solutions at a time.")] = 2,
    rounds: Annotated[int, typer.Option(help="Of which the medians are printed.")] = 3,
    before: Annotated[Path | None, typer.Option(help="Another checkout.")] = None,
    measure: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print a table."""
    counts = [int(size) for size in sizes.split(",")]
    if measure is not None:
        run = prime_code_rates if measure == "prime_code" else lambda *args: asyncio.run(judge_rates(*args))
        typer.echo(json.dumps(run(counts, solutions, at_once)))
        return
    here = Path(__file__).parents[1]
    kinds = {"judge": here, "prime_code": here, **({"judge before": before} if before else {})}
    arguments = ["--sizes", sizes, "--solutions", str(solutions), "--at-once", str(at_once)]
    found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, checkout in kinds.items():
            found[kind].append(in_process(kind.partition(" ")[0], checkout, arguments))
    typer.echo(f"| Solutions a second | {' | '.join(f'{count} tests' for count in counts)} |")
    typer.echo(f"|---|{'---|' * len(counts)}")
    for kind, rates in found.items():
        medians = [statistics.median(rate) for rate in zip(*rates, strict=True)]
        typer.echo(f"| {kind} | {' | '.join(f'{rate:.2g}' for rate in medians)} |")


if __name__ == "__main__":
    typer.run(main)
