"""Texts of one's own before a reward manager, in a child process that is killed when it hangs: nothing else ends an
endless regex. For the commands `redteam` and `grade`."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from verl_tool.errors import VerlToolError

START_SECONDS = 180.0
"""For the imports and to make the manager."""
CRASHES = "crashes"
"""How the failure of a case begins where the manager raised."""
STAND_IN_TOKENIZER = "CodePoints"
"""The class of `manager_worker`'s tokenizer, which has `decode` alone: errors about it name it."""
_ANSWER_SECONDS = 2.0
"""A manager that gives way to the event loop is told of by its own process first."""
_GRADING = "verl_tool.agent_workers.reward_manager.grading.manager_worker"


class UnusableError(VerlToolError):
    """The manager, its options or its data cannot be used."""


@dataclass(frozen=True)
class ManagerAnswer:
    """What a trajectory holds behind its prompt."""

    name: str
    segments: tuple[tuple[str, str], ...]
    """Author (``model``, ``tool``, ``template``) and text."""


@dataclass(frozen=True)
class GradingCase:
    row: Mapping[str, Any]
    """A row of a recipe's data with ``ground_truth`` in place of ``reward_model``."""
    answer: ManagerAnswer


@dataclass(frozen=True)
class GradedCase:
    score: float = 0.0
    acc: float = 0.0
    """More than 0.5: taken for right. Whether the score is above 0, for managers that tell no ``acc``."""
    failure: str = ""
    """Why there is no score: a fault, ``hangs: …``, ``crashes: …`` or ``ends: …``."""
    partial: bool = False
    """The manager gives partial credit (`GradingRewardManager.partial_credit`)."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the manager's ``reward_extra_info``, ``acc`` among them."""


def hangs(seconds: float) -> str:
    """The failure of a case that came to no end."""
    return f"hangs: no end within {seconds:g} s"


def graded_in_child(
    name: str, options: Mapping[str, Any], cases: Sequence[GradingCase], seconds: float
) -> Iterator[GradedCase]:
    """What the manager makes of each case. A child that hangs or ends is replaced for the next case. Raises
    UnusableError if the manager cannot be made."""
    # A fork of this process would have the locks of its threads, and a new interpreter each time all imports to make.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_GRADING])
    done = 0
    while done < len(cases):
        local, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_grade_all, args=(name, options, cases[done:], seconds, theirs), name="grader")
        child.start()
        theirs.close()
        try:
            for graded in _received(local, seconds):
                done += 1
                yield graded
                if done == len(cases) or graded.failure.startswith(("hangs", "ends")):
                    break
        finally:
            child.kill()
            child.join()
            local.close()


def _received(pipe: Connection, seconds: float) -> Iterator[GradedCase]:
    """Raises UnusableError."""
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
            yield GradedCase(failure="ends: the process that grades is no more")


def _grade_all(
    name: str, options: Mapping[str, Any], cases: Sequence[GradingCase], seconds: float, pipe: Connection
) -> None:
    """In the child."""
    from verl_tool.agent_workers.reward_manager.grading.manager_worker import grade_each  # imports torch and verl

    asyncio.run(grade_each(name, options, cases, seconds, pipe))
