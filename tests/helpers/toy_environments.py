"""Environments for tests, with tools, a user and rewards that a test can foretell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_tool.environments.environment_tool import Environment
from verl_tool.errors import ToolFault
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind, Opening, ToolDescription
from verl_tool.servers.tools.base import ToolResult
from verl_tool.verification import Verdict


@dataclass
class GuessSession:
    secret: int
    guesses: list[str] = field(default_factory=list)


class GuessEnvironment(Environment):
    """Each turn is a guess, and a user answers. ``boom`` breaks the connection, ``crash`` is a bug."""

    name = "guess"
    description = "Guess a number."

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[Mapping[str, Any]] = []
        self.ended: list[GuessSession] = []

    async def begin(self, trajectory_id: str, arguments: Mapping[str, Any]) -> tuple[GuessSession, Opening]:
        self.begun.append(arguments)
        if "refuses" in arguments:
            raise ToolFault(FaultKind(arguments["refuses"]), "no game today", retryable=False)
        question = {"role": "user", "content": f"Guess a number below {arguments.get('below', 10)}."}
        return GuessSession(int(arguments["secret"])), Opening(messages=[question], every_turn=True)

    async def step(self, session: GuessSession, call: Call) -> ToolResult:
        session.guesses.append(call.input)
        if call.input == "boom":
            raise ToolFault(FaultKind.STATE_LOST, "the connection broke", retryable=False)
        if call.input == "nan":
            return ToolResult("What?", reward=float("nan"), role="user")
        if call.input == "crash":
            raise ValueError("a bug")
        if not call.input.strip().isdigit():
            return ToolResult("That is no number.", valid=False, reward=-0.1, role="user")
        right = int(call.input) == session.secret
        return ToolResult("Right!" if right else "No.", done=right, reward=float(right), role="user")

    async def end(self, session: GuessSession) -> None:
        self.ended.append(session)


class ShopEnvironment(Environment):
    """Tools that only this trajectory has; the last text is judged by what the row's ground truth says."""

    name = "shop"
    description = "A shop with prices."

    async def begin(self, trajectory_id: str, arguments: Mapping[str, Any]) -> tuple[dict[str, int], Opening]:
        prices = dict(arguments["prices"])
        items = {"type": "string", "description": f"One of {', '.join(prices)}.", "enum": [*prices]}
        parameters = {"type": "object", "properties": {"item": items}, "required": ["item"]}
        tool = ToolDescription(name="price_of", description=f"Prices of {', '.join(prices)}.", parameters=parameters)
        return prices, Opening(tools=[tool])

    async def step(self, session: dict[str, int], call: Call) -> ToolResult:
        item = (call.arguments or {}).get("item")
        return ToolResult(str(session.get(str(item), "not sold here")), reward=0.25)

    async def verdict(
        self, session: dict[str, int], text: str, data: Mapping[str, Any], rewards: list[float]
    ) -> Verdict:
        reward = (float(str(data["answer"]) in text) + sum(rewards)) * float(data.get("factor", 1))
        return Verdict(reward, told=f"read {text!r}")
