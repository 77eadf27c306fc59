"""What an environment is: a tool in which a trajectory begins, and which judges it at the end.

    class Doubling(Environment):
        name = "doubling"
        description = "Doubles a number."

        async def begin(self, trajectory_id, arguments):
            question = {"role": "user", "content": f"What is twice {arguments['number']}?"}
            return arguments["number"], Opening(messages=[question], every_turn=True)

        async def step(self, session, call):
            right = call.input.strip() == str(2 * session)
            return ToolResult("Right." if right else "Wrong.", done=True, reward=float(right), role="user")

A row names it in ``tools_kwargs.environment``, whose entries are the `arguments`. The loop renders the prompt after
`begin`, and requests the verdict after the last turn. The tool server holds the session between turns, so its limits,
its time to live and its exactly-once answers hold for environments too.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl_tool.errors import ToolFault
from verl_tool.formats import Call
from verl_tool.protocol import ENVIRONMENT_FIELD, FaultKind, Opening
from verl_tool.servers.tools.base import Context, InvalidCall, Tool, ToolResult
from verl_tool.verification import EnvironmentVerification, Verdict


@dataclass
class EnvironmentState:
    """A trajectory's place in an environment."""

    session: Any
    """What `Environment.begin` returned."""
    opening: Opening
    rewards: list[float] = field(default_factory=list)
    """Rewards of the steps that gave one."""
    steps: int = 0
    invalid_steps: int = 0
    done: bool = False
    truncated: bool = False
    """Whether a limit of the environment's ended it."""


class Environment(Tool):
    """A tool in which trajectories begin. An adapter has `begin`, `step` and, if it needs them, `verdict` and `end`.

    Raise `ToolFault` for what no policy can cause: a lost connection is ``state_lost`` once `begin` has returned, since
    an environment elsewhere has no step numbers. An error that an action may cause is an observation.
    """

    is_environment: ClassVar[bool] = True
    stateful: ClassVar[bool] = True

    @abstractmethod
    async def begin(self, trajectory_id: str, arguments: Mapping[str, Any]) -> tuple[Any, Opening]:
        """Start an episode and return its session with what the prompt shows. Raises ToolFault."""

    @abstractmethod
    async def step(self, session: Any, call: Call) -> ToolResult:
        """Play one action: a call of one of the opening's tools or, with `every_turn`, a whole turn in `call.input`
        (then `call.arguments` is None). Raises ToolFault."""

    async def verdict(self, session: Any, text: str, data: Mapping[str, Any], rewards: list[float]) -> Verdict:
        """Judge the episode. `text` is what the model wrote last, if no call sent it; `data` is the row's ground truth.
        The default is the sum of the steps' `rewards`, 0 without any. Raises ToolFault."""
        return Verdict(sum(rewards))

    async def end(self, session: Any) -> None:
        """Free a session. Called once, also after an episode that did not end."""

    @property
    def verdict_seconds(self) -> float:
        """How long `verdict` may take, if that is longer than a call of a tool. The loop's deadline must allow it."""
        return 0.0

    @property
    def call_names(self) -> tuple[str, ...]:
        """None: no model calls an environment by its name."""
        return ()

    def opening(self, state: EnvironmentState) -> Opening:
        return state.opening

    async def create_state(self, trajectory_id: str, extra: Mapping[str, Any]) -> EnvironmentState:
        if ENVIRONMENT_FIELD not in extra:
            message = f"a trajectory begins in {self.name} with {ENVIRONMENT_FIELD}; set it in the row's tools_kwargs"
            raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)
        arguments = {name: value for name, value in extra[ENVIRONMENT_FIELD].items() if name != "name"}
        session, opening = await self.begin(trajectory_id, arguments)
        return EnvironmentState(session, opening.model_copy(update={"verdict_seconds": self.verdict_seconds}))

    async def close_state(self, state: EnvironmentState) -> None:
        await self.end(state.session)

    async def run(self, call: Call, context: Context) -> ToolResult:
        state: EnvironmentState = context.state
        if state.done:
            raise InvalidCall("the episode has ended; no further action is played")
        result = await self.step(state.session, call)
        state.steps += 1
        state.invalid_steps += not result.valid
        state.done, state.truncated = result.done, result.truncated
        if result.reward is not None:
            if not math.isfinite(result.reward):
                raise _not_finite(self.name, result.reward)
            state.rewards.append(result.reward)
        return result

    async def judge(self, state: EnvironmentState, text: str, verification: EnvironmentVerification) -> Verdict:
        verdict = await self.verdict(state.session, text, verification.data, list(state.rewards))
        if verdict.reward is not None and not math.isfinite(verdict.reward):
            raise _not_finite(self.name, verdict.reward)
        counts = {
            "env_steps": float(state.steps),
            "env_invalid_steps": float(state.invalid_steps),
            "env_done": float(state.done and not state.truncated),
            "env_judged": float(type(self).verdict is not Environment.verdict),
        }
        return Verdict(verdict.reward, verdict.told, {**counts, **verdict.numbers}, verdict.fault)


def _not_finite(name: str, reward: float) -> ToolFault:
    """What the policy wrote may have brought it about, such as ``nan`` in a game of numbers."""
    words = f"{name} gave the reward {reward!r}, which is no finite number"
    return ToolFault(FaultKind.TOOL_CRASHED, words, retryable=False)
