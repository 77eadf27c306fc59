"""Run a training's reward manager in a thread for a few seconds, since a child process would take longer to start."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.reward import load_reward_manager

from verl_tool.agent_workers.reward_manager.grading.manager_process import GradedCase, GradingCase
from verl_tool.agent_workers.reward_manager.grading.manager_worker import CodePoints, grade

log = logging.getLogger(__name__)

_ENDING_SECONDS = 5.0
"""Time for killed processes of the manager to exit."""
_POLL_SECONDS = 0.02


def graded_in_thread(
    config: DictConfig, cases: Iterable[GradingCase], seconds: float, enough: Callable[[Sequence[GradedCase]], bool]
) -> list[GradedCase]:
    """Grade `cases` with the manager of a trainer's config, one after the other, for at most `seconds`.

    Stops when `enough` returns true for the grades. The manager is users' code: if it hangs, its thread is left behind.
    What it logs is dropped, and the processes that it started in its event loop are killed.
    """
    graded: list[GradedCase] = []

    async def grade_all() -> None:
        manager = load_reward_manager(config, CodePoints())
        for case in cases:
            graded.append(await grade(manager, case, seconds))
            if enough(graded):
                return

    def run() -> None:
        loop = _Loop()
        try:
            loop.run_until_complete(asyncio.wait_for(grade_all(), seconds))
        except asyncio.TimeoutError:
            log.info("%d answers were graded within %g s", len(graded), seconds)
        except Exception as error:  # noqa: BLE001 - a manager is users' code
            log.info("the reward manager cannot be made: %s: %s", type(error).__name__, error)
        finally:
            loop.run_until_complete(loop.end())
            loop.close()

    thread = threading.Thread(target=run, name="graded_in_thread", daemon=True)
    of_managers = logging.getLogger("verl_tool.agent_workers")
    level = of_managers.level
    of_managers.setLevel(logging.CRITICAL)
    try:
        thread.start()
        thread.join(seconds + _ENDING_SECONDS)
    finally:
        of_managers.setLevel(level)
    return list(graded)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that tracks the processes that were started in it."""

    def __init__(self) -> None:
        super().__init__()
        self._processes: list[asyncio.SubprocessTransport] = []

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> Any:
        started = await super().subprocess_exec(*args, **kwargs)
        self._processes.append(started[0])
        return started

    async def subprocess_shell(self, *args: Any, **kwargs: Any) -> Any:
        started = await super().subprocess_shell(*args, **kwargs)
        self._processes.append(started[0])
        return started

    async def end(self) -> None:
        """Cancel the remaining tasks and kill the processes. Waits a limited time for their exit."""
        left = [task for task in asyncio.all_tasks(self) if task is not asyncio.current_task(self)]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for process in self._processes:
            process.close()
        for _ in range(round(_ENDING_SECONDS / _POLL_SECONDS)):
            if all(process.get_returncode() is not None for process in self._processes):
                break
            await asyncio.sleep(_POLL_SECONDS)
