"""Run a reward manager on single answers in a child process, for the commands `redteam` and `grade`.

The process is killed if the manager hangs, since nothing else ends an endless regular expression.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
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


class ManagerProcess:
    """A reward manager in a child process. One that hangs or exits is replaced for the next case.

    Use it in one thread at a time, and `close` it.
    """

    def __init__(self, name: str, options: Mapping[str, Any], seconds: float) -> None:
        """`seconds` is the time limit of one case. The process starts with the first case, or with `start`."""
        self._name, self._options, self._seconds = name, options, seconds
        self._running: tuple[BaseProcess, Connection] | None = None

    def start(self) -> None:
        """Start the process and make the manager. Raises UnusableError if it cannot be made."""
        if self._running is not None:
            return
        # A fork of this process would inherit the locks of its threads, and new interpreters would repeat all imports.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_GRADING])
        local, theirs = context.Pipe()
        arguments = (self._name, self._options, self._seconds, theirs)
        child = context.Process(target=_grade_all, args=arguments, name="grader")
        child.start()
        theirs.close()
        self._running = child, local
        try:
            _await_manager(local)
        except BaseException:
            self.close()
            raise

    def grade(self, case: GradingCase) -> GradedCase:
        """Grade one case. Raises UnusableError if the manager cannot be made."""
        self.start()
        assert self._running is not None
        pipe = self._running[1]
        try:
            pipe.send(case)
            in_time = pipe.poll(self._seconds + _ANSWER_SECONDS)
            graded: GradedCase = pipe.recv() if in_time else GradedCase(failure=hangs(self._seconds))
        except (EOFError, OSError):
            graded = GradedCase(failure="ends: the grading process exited")
        except BaseException:  # the answer to this case would be taken for that to the next
            self.close()
            raise
        if graded.failure.startswith(("hangs", "ends")):
            self.close()
        return graded

    def close(self) -> None:
        """Kill the process."""
        if self._running is not None:
            (child, pipe), self._running = self._running, None
            child.kill()
            child.join()
            pipe.close()


def graded_in_child(
    name: str, options: Mapping[str, Any], cases: Sequence[GradingCase], seconds: float
) -> Iterator[GradedCase]:
    """Yield the grade of each case. Raises UnusableError if the manager cannot be made."""
    process = ManagerProcess(name, options, seconds)
    try:
        for case in cases:
            yield process.grade(case)
    finally:
        process.close()


def _await_manager(pipe: Connection) -> None:
    """Return when the child has a manager. Raises UnusableError if it has none."""
    if not pipe.poll(START_SECONDS):
        raise UnusableError(f"the manager was not made within {START_SECONDS:g} s")
    try:
        problem = pipe.recv()
    except (EOFError, OSError):
        raise UnusableError("the process ended while the manager was made") from None
    if problem:
        raise UnusableError(problem)


def _grade_all(name: str, options: Mapping[str, Any], seconds: float, pipe: Connection) -> None:
    """Grade the cases that come, in the child process."""
    try:
        from verl_tool.agent_workers.reward_manager.grading.manager_worker import grade_each  # imports torch and verl
    except ModuleNotFoundError as error:
        pipe.send(f"no reward manager can be loaded: {error}; install verl-tool with its extra cpu or gpu")
        return
    asyncio.run(grade_each(name, options, seconds, pipe))
