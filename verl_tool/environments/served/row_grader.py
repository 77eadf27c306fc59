"""Grade the episode of a row: by its verifier in the workspace, or by a reward manager in a child process.

The manager imports torch and verl; this process does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_tool.agent_workers.reward_manager.grading.manager_process import (
    START_SECONDS,
    GradingCase,
    ManagerAnswer,
    ManagerProcess,
    UnusableError,
)
from verl_tool.environments.served.task_rows import TaskRow, TaskRows
from verl_tool.errors import ConfigError

GRADING_SECONDS = 120.0
"""Time limit of one answer; more is a hang. The deadlines of managers are shorter."""
QUEUE_SECONDS = 600.0
"""How long an answer may wait for a manager."""
_PERHAPS_BY_THE_ANSWER = ("hangs", "ends")


@dataclass(frozen=True)
class RowGrade:
    """The reward of an episode."""

    reward: float | None = None
    """None: there is none, by no fault of the policy's; see `failure`."""
    failure: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What else the grader gives, such as ``acc``."""


class RowGrader:
    """Grades answers with a reward manager, in `processes` child processes. `close` it."""

    def __init__(
        self,
        manager: str | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        processes: int = 1,
        seconds: float = GRADING_SECONDS,
    ) -> None:
        """`manager` is a name or a path, with its `options`; None: rows are graded by their verifiers only."""
        self.manager = manager
        self._seconds = seconds
        made = [ManagerProcess(manager, options or {}, seconds) for _ in range(processes)] if manager else []
        self._idle = made.copy()
        self._all = made
        self._slots = asyncio.Semaphore(max(1, len(made)))

    async def start(self, rows: TaskRows) -> None:
        """Make the manager. Raises ConfigError if it cannot be made, or if a row has no grader."""
        ungraded = next((row for row in rows.rows if row.verification is None), None)
        if ungraded is None:
            return
        if not self._all:
            raise ConfigError(
                f"row {ungraded.index} has no verifier in its reward_model; name the manager that grades it by "
                "--reward_manager"
            )
        try:
            await asyncio.to_thread(self._all[0].start)
        except UnusableError as error:
            raise ConfigError(f"--reward_manager {self.manager}: {error}") from None

    async def grade(self, row: TaskRow, turns: Sequence[str]) -> RowGrade:
        """Grade the turns of a policy.

        An answer at which the manager hangs or exits is graded as an empty one, as in a training. Only if that fails
        too, the manager is to blame.
        """
        grade = await self._grade(row, turns)
        if grade.failure.startswith(_PERHAPS_BY_THE_ANSWER):
            return await self._grade(row, [""])
        return grade

    async def _grade(self, row: TaskRow, turns: Sequence[str]) -> RowGrade:
        try:
            await asyncio.wait_for(self._slots.acquire(), QUEUE_SECONDS)
        except asyncio.TimeoutError:
            return RowGrade(failure=f"no reward manager was free within {QUEUE_SECONDS:g} s; add --grader_processes")
        process = self._idle.pop()
        written = ManagerAnswer(str(row.index), tuple(("model", turn) for turn in turns))
        case = GradingCase({**row.content, "ground_truth": row.ground_truth}, written)
        # The thread ends by itself: at the latest when a hanging manager has been killed.
        work = asyncio.ensure_future(asyncio.to_thread(process.grade, case))
        work.add_done_callback(lambda _: self._release(process))
        try:
            graded = await asyncio.wait_for(asyncio.shield(work), self._seconds + START_SECONDS)
        except (UnusableError, asyncio.TimeoutError) as error:
            return RowGrade(failure=f"{self.manager} cannot grade: {error or 'no answer'}")
        if graded.failure:
            return RowGrade(failure=graded.failure)
        return RowGrade(graded.score, numbers={**graded.extra, "acc": graded.acc})

    def _release(self, process: ManagerProcess) -> None:
        self._idle.append(process)
        self._slots.release()

    async def close(self) -> None:
        """End the child processes."""
        for process in self._all:
            await asyncio.to_thread(process.close)
