"""Run a reward manager on single answers in a child process, for the commands `redteam` and `grade`.

The process is killed if the manager hangs, since nothing else ends an endless regular expression.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from verl_tool.errors import VerlToolError

START_SECONDS = 180.0
"""Time for the imports and to make the manager."""
CRASHES = "crashes"
"""Beginning of the failure of a case in which the manager raised an exception."""
STAND_IN_TOKENIZER = "CodePoints"
"""Class of the tokenizer of `manager_worker`, whose only method is `decode`. Errors about other methods name it."""
_ANSWER_SECONDS = 2.0
"""Additional time, in which the child reports a manager that yields to the event loop but takes too long."""
_GRADING = "verl_tool.agent_workers.reward_manager.grading.manager_worker"


class UnusableError(VerlToolError):
    """The manager, its options or its data cannot be used."""


@dataclass(frozen=True)
class ManagerAnswer:
    """Content of a trajectory after its prompt."""

    name: str
    segments: tuple[tuple[str, str], ...]
    """Author (``model``, ``tool``, ``template``) and text."""


@dataclass(frozen=True)
class GradingCase:
    row: Mapping[str, Any]
    """A row of a recipe's data, with ``ground_truth`` instead of ``reward_model``."""
    answer: ManagerAnswer


@dataclass(frozen=True)
class GradedCase:
    score: float = 0.0
    acc: float = 0.0
    """The answer counts as right if this is above 0.5. Without an ``acc`` of the manager, 1 for a score above 0."""
    failure: str = ""
    """Why there is no score: a fault, ``hangs: …``, ``crashes: …`` or ``ends: …``."""
    partial: bool = False
    """Whether the manager gives partial credit (`GradingRewardManager.partial_credit`)."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the manager's ``reward_extra_info``, including ``acc``."""


def hangs(seconds: float) -> str:
    """Return the failure of a case that took too long."""
    return f"hangs: no end within {seconds:g} s"


def graded_in_child(
    name: str, options: Mapping[str, Any], cases: Sequence[GradingCase], seconds: float
) -> Iterator[GradedCase]:
    """Yield the grade of each case. A child process that hangs or exits is replaced for the next case.

    Raises UnusableError if the manager cannot be made.
    """
    # A fork of this process would inherit the locks of its threads, and new interpreters would repeat all imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_GRADING])
    done = 0
    while done < len(cases):
        local, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_grade_all, args=(name, options, cases[done:], seconds, theirs), name="grader")
        child.start()
        theirs.close()
        try:
            for graded in _receive(local, seconds):
                done += 1
                yield graded
                if done == len(cases) or graded.failure.startswith(("hangs", "ends")):
                    break
        finally:
            child.kill()
            child.join()
            local.close()


def _receive(pipe: Connection, seconds: float) -> Iterator[GradedCase]:
    """Yield what the child sends. Raises UnusableError if it has no manager."""
    if not pipe.poll(START_SECONDS):
        raise UnusableError(f"the manager was not made within {START_SECONDS:g} s")
    try:
        problem = pipe.recv()
    except EOFError:
        raise UnusableError("the process ended while the manager was made") from None
    if problem:
        raise UnusableError(problem)
    while True:
        try:
            yield pipe.recv() if pipe.poll(seconds + _ANSWER_SECONDS) else GradedCase(failure=hangs(seconds))
        except EOFError:
            yield GradedCase(failure="ends: the grading process exited")


def _grade_all(
    name: str, options: Mapping[str, Any], cases: Sequence[GradingCase], seconds: float, pipe: Connection
) -> None:
    """Grade all cases, in the child process."""
    from verl_tool.agent_workers.reward_manager.grading.manager_worker import grade_each  # imports torch and verl

    asyncio.run(grade_each(name, options, cases, seconds, pipe))
