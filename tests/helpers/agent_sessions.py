"""Sessions of the gateway over a model that writes what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.content.parts import TextPart
from verl_tool.formats import format_by_name
from verl_tool.gateway.conversation import AgentMessage, AgentRequest, Role
from verl_tool.gateway.session import AgentSession, SessionModel, SessionOptions
from verl_tool.gateway.session_tree import ModelTurn


class WritingGenerator:
    """Writes the texts of `turns` one after the other, and keeps what it was fed."""

    def __init__(self, tokenizer: Tokenizer, turns: Sequence[str] = ()) -> None:
        self.tokenizer, self.turns = tokenizer, list(turns)
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        self.prompts.append(prompt_ids)
        ids = self.tokenizer.encode(self.turns.pop(0))
        return Generation(ids, [-0.5] * len(ids), "stop")


def make_session(tokenizer: Tokenizer, turns: Sequence[str], fmt: str = "hermes", **options: Any) -> AgentSession:
    """A session whose model writes `turns`."""
    generator = WritingGenerator(tokenizer, turns)
    model = SessionModel.create(generator, tokenizer, [format_by_name(fmt)], 1 << 20)
    return AgentSession("s", model, SessionOptions(**options))


def say(role: str, text: str, **fields: Any) -> AgentMessage:
    """A message of text."""
    return AgentMessage(Role(role), (TextPart(text),) if text else (), **fields)


async def ask(session: AgentSession, *messages: AgentMessage, deliver: bool = True, **fields: Any) -> ModelTurn:
    """The model's answer to a conversation, received by the agent."""
    request = AgentRequest("test", messages, **fields)
    pending = await session.open_answer(request)
    turn = await pending.task
    session.close_answer(pending, delivered=deliver)
    return turn
