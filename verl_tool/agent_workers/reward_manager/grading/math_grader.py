"""Compare mathematical answers in child processes (`math_process`), which are killed at a deadline."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from verl_tool.agent_workers.reward_manager.grade import GraderFault
from verl_tool.util.json_lines_process import ask_process, kill_process, read_answer

log = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("math_process.py")
_START_SECONDS = 60.0
"""Time for the imports of a new process on a machine under load."""


class MathGrader:
    """Makes at most `processes` comparisons at the same time, each within `seconds`.

    Belongs to the event loop of its first use.
    """

    def __init__(self, processes: int, seconds: float) -> None:
        self._seconds = seconds
        self._places = asyncio.Semaphore(processes)
        self._idle: list[asyncio.subprocess.Process] = []

    async def equal(self, gold: str, answer: str) -> bool:
        r"""Return whether two answers, LaTeX without ``\boxed``, are equal.

        An answer that takes too long or crashes the process is wrong, since a model can write one. The time starts when
        a process is available. Raises GraderFault if no process starts, or the gold answer cannot be read.
        """
        if answer.strip() == gold.strip():
            return True
        async with self._places:
            process = self._idle.pop() if self._idle else await self._start()
            reusable = False
            try:
                equal, reusable = await self._compare(process, gold, answer)
            finally:
                if reusable:
                    self._idle.append(process)
                else:  # also after a cancellation, when it may still be computing
                    await kill_process(process)
        return equal

    async def _compare(self, process: asyncio.subprocess.Process, gold: str, answer: str) -> tuple[bool, bool]:
        """Return whether they are equal, and whether the process may be used again. Raises GraderFault."""
        try:
            await asyncio.wait_for(_request(process, gold, answer), self._seconds)
        except (asyncio.TimeoutError, OSError, ValueError) as error:
            raise GraderFault(f"the gold answer {gold[:80]!r} cannot be read: {error!r}") from error
        try:
            verdict = await asyncio.wait_for(read_answer(process), self._seconds)
        except (asyncio.TimeoutError, OSError, ValueError):
            log.info("comparing %r ended or took more than %g s: wrong", answer[:80], self._seconds)
            return False, False
        return bool(verdict["equal"]), not verdict["worn"]

    async def close(self) -> None:
        """End the idle child processes. They also end with this process."""
        while self._idle:
            await kill_process(self._idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(_PROGRAM), stdin=pipe, stdout=pipe, stderr=null
        )
        try:
            await asyncio.wait_for(_request(process, "1", "1"), _START_SECONDS)
            await asyncio.wait_for(read_answer(process), _START_SECONDS)
        except (asyncio.TimeoutError, OSError, ValueError) as error:
            await kill_process(process)
            raise GraderFault(
                f"the process that compares answers does not start ({type(error).__name__}); is math-verify installed? "
                "pip install 'verl-tool[recipes]'"
            ) from error
        except BaseException:
            await kill_process(process)
            raise
        return process


async def _request(process: asyncio.subprocess.Process, gold: str, answer: str) -> None:
    """Send a question and wait until the process has read the gold answer."""
    if "gold" not in await ask_process(process, {"gold": gold, "answer": answer}):
        raise ValueError("it failed")
