"""A real tool server with a real sandbox, one for all tests of a file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest_asyncio
from live_server import LiveServers

from verl_tool.agent_workers.reward_manager.grading.code_tests import JudgeRun, TestSuite, Verdicts
from verl_tool.client import ToolClient
from verl_tool.servers.tools.python_code import PythonCodeTool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def code_server_url() -> AsyncIterator[str]:
    """The URL of a server that runs code."""
    running = LiveServers()
    try:
        yield (await running.start([PythonCodeTool(workers=1)])).url
    finally:
        await running.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge(code_server_url: str) -> AsyncIterator[Callable[..., Awaitable[Verdicts]]]:
    """Judges a solution by the server: `await judge(solution, *tests, programs=())`."""
    async with ToolClient(code_server_url) as client:

        async def judged(
            solution: str,
            *tests: str,
            programs: tuple[tuple[str, str], ...] = (),
            setup: str = "",
            test_seconds: float = 4.0,
            total_seconds: float = 15.0,
        ) -> Verdicts:
            run = JudgeRun.of(solution, TestSuite(tests, programs, setup), test_seconds, total_seconds)
            answer = await client.run_code(run.code, stdin=run.stdin, run_timeout=run.run_timeout, files=run.files)
            return run.verdicts(answer)

        yield judged
