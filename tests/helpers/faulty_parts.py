"""A tool, a reward manager and an agent loop that fail at times, for trainings with injected faults."""

from __future__ import annotations

import random
from typing import Any

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.verl.agent_loop import VerlToolAgentLoop
from verl_tool.agent_workers.reward_manager.calculator import CalculatorRewardManager
from verl_tool.agent_workers.reward_manager.grade import Grade, GraderFault
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.errors import SandboxError
from verl_tool.formats import Call
from verl_tool.servers.tools import tool_class
from verl_tool.servers.tools.base import Context, ToolResult

SHARE = 0.05


class FaultyCalculatorTool(tool_class("calculator")):  # type: ignore[misc]
    """A calculator that loses one call in twenty."""

    async def run(self, call: Call, context: Context) -> ToolResult:
        if random.random() < SHARE:
            raise SandboxError("the sandbox broke", retryable=False)
        return await super().run(call, context)


class FaultyRewardManager(CalculatorRewardManager):
    """Gives no reward for one answer in twenty."""

    async def grade(self, sample: Sample) -> Grade:
        if random.random() < SHARE:
            raise GraderFault("the grader is away")
        return await super().grade(sample)


class BrokenRewardManager(CalculatorRewardManager):
    """Never gives a reward."""

    async def grade(self, sample: Sample) -> Grade:
        raise KeyError("no such column")


class AbortingAgentLoop(VerlToolAgentLoop):
    """An agent loop whose engine aborts one turn in twenty."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        generator = self._worker.generator
        if not isinstance(generator, _Aborting):
            self._worker.generator.__class__ = _aborting(type(generator))


class _Aborting:
    """Marks a generator that aborts."""


def _aborting(generator: type[Any]) -> type[Any]:
    class Aborting(_Aborting, generator):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            done = await super().generate(*args, **kwargs)
            if random.random() >= SHARE:
                return done
            # Within the turn: one that has its stop string is whole, whatever the engine says of it.
            return Generation(done.token_ids[:-1], done.log_probs and done.log_probs[:-1], "aborted")

    return Aborting
