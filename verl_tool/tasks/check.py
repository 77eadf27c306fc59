"""Whether a task can be solved, and only by solving it: its solution gets 1, doing nothing 0, twice the same, and so do
attacks on its verifier."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from verl_tool.errors import SandboxError, ToolFault, VerlToolError
from verl_tool.tasks.attacks import TaskAttack, attempt
from verl_tool.tasks.task import SOLUTION, Task
from verl_tool.tasks.task_workspace import TaskWorkspaces, run_solution
from verl_tool.verification import Verdict

TIMES = 2
"""How often each is done, in workspaces of their own."""
_MAX_DISPLAY_CHARACTERS = 1000
_ATTACKS_AT_ONCE = 4


@dataclass(frozen=True)
class TaskFinding:
    """What the check of one task gave."""

    name: str
    solved: tuple[float, ...] = ()
    """Rewards of the solution."""
    idle: tuple[float, ...] = ()
    """Rewards of doing nothing."""
    seconds: float = 0.0
    """That the slowest verification took."""
    problem: str = ""
    """What is wrong with the task; empty if it is right."""
    attacks: int = 0
    """How many were tried."""
    ran: bool = True
    """False: the task is not supported, or its sandbox failed."""
    warning: str = ""
    """What else there is to know of the task."""


async def check(task: Task, workspaces: TaskWorkspaces) -> TaskFinding:
    """Solve the task and leave it alone, each `TIMES`. Raises ConfigError if its files cannot be laid out, SandboxError
    or ToolFault if the sandbox fails."""
    if not task.solution:
        return TaskFinding(
            task.name, problem=f"there is no solution/{SOLUTION}, so that nobody knows whether it can be solved"
        )
    try:
        solved = [await _attempt(task, workspaces, solve=True) for _ in range(TIMES)]
        idle = [await _attempt(task, workspaces, solve=False) for _ in range(TIMES)]
    except _Failed as failure:
        return TaskFinding(task.name, problem=str(failure))
    return TaskFinding(
        task.name,
        tuple(verdict.reward or 0.0 for verdict in solved),
        tuple(verdict.reward or 0.0 for verdict in idle),
        max(verdict.seconds for verdict in (*solved, *idle)),
        _problem(solved, 1.0, "the solution") or _problem(idle, 0.0, "doing nothing"),
    )


async def check_attacks(
    finding: TaskFinding, task: Task, workspaces: TaskWorkspaces, attacks: Sequence[TaskAttack]
) -> TaskFinding:
    """The finding with the attacks that got a reward, or no verdict, as its problem. Raises ConfigError."""
    at_once = asyncio.Semaphore(_ATTACKS_AT_ONCE)

    async def describe(attack: TaskAttack) -> str:
        async with at_once:
            try:
                score = (await attempt(attack, task, workspaces)).score
            except (SandboxError, ToolFault) as error:
                return f"{attack.name}: no verdict: {error}"
        return f"{attack.name} got {score}" if score != 0.0 else ""

    problems = [finding.problem, *await asyncio.gather(*map(describe, attacks))]
    problem = "; ".join(problem for problem in problems if problem)
    return replace(finding, attacks=len(attacks), problem=problem)


class _Failed(VerlToolError):
    """The solution failed, and did not get its reward."""


async def _attempt(task: Task, workspaces: TaskWorkspaces, *, solve: bool) -> Verdict:
    async with workspaces.open(task) as workspace:
        failure = await run_solution(task, workspace, stays=workspaces.shared_verifier) if solve else ""
        verdict = await workspaces.verify(task, workspace)
        if failure and verdict.reward != 1.0:
            raise _Failed(failure)
        return verdict


def _problem(verdicts: list[Verdict], wanted: float, what: str) -> str:
    for number, verdict in enumerate(verdicts, 1):
        if verdict.reward != wanted:
            description = f": {verdict.told[-_MAX_DISPLAY_CHARACTERS:]}" if verdict.told else ""
            return f"{what} got {verdict.reward:g} in place of {wanted:g} at attempt {number}{description}"
    return ""
