"""A real sandbox, one for all tests of a file, in which solutions are judged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest_asyncio

from verl_tool.judge.code_tests import JudgeRun, TestSuite, Verdicts, judge_modules
from verl_tool.sandbox import Limits, SandboxPool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge() -> AsyncIterator[Callable[..., Awaitable[Verdicts]]]:
    """Judges a solution: `await judge(solution, *tests, programs=())`."""
    async with SandboxPool(workers=1) as pool:

        async def judged(
            solution: str,
            *tests: str,
            programs: tuple[tuple[str, str], ...] = (),
            setup: str = "",
            suite: TestSuite | None = None,
            test_seconds: float = 4.0,
            total_seconds: float = 15.0,
            max_display_chars: int = 0,
        ) -> Verdicts:
            suite = suite or TestSuite(tests, programs, setup)
            run = JudgeRun.of(solution, suite, test_seconds, total_seconds, max_display_chars)
            limits = Limits(wall_seconds=run.run_timeout)
            ran = await pool.run(run.code, stdin=run.stdin, files=judge_modules(), limits=limits)
            return run.read(ran.stdout, ran.stderr, f"exit code {ran.exit_code}, limit {ran.limit_hit}")

        yield judged
