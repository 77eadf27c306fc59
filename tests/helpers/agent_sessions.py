"""Sessions of the gateway over a model that writes scripted turns."""

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
    """Writes the texts of `turns` one after the other, and records its inputs."""

    def __init__(self, tokenizer: Tokenizer, turns: Sequence[str] = ()) -> None:
        self.tokenizer, self.turns = tokenizer, list(turns)
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        self.prompts.append(prompt_ids)
        ids = self.tokenizer.encode(self.turns.pop(0))
        return Generation(ids, [-0.5] * len(ids), "stop")


def make_session(tokenizer: Tokenizer, turns: Sequence[str], fmt: str = "hermes", **options: Any) -> AgentSession:
    """Make a session whose model writes `turns`."""
    generator = WritingGenerator(tokenizer, turns)
    model = SessionModel.create(generator, tokenizer, [format_by_name(fmt)], 1 << 20)
    return AgentSession("s", model, SessionOptions(**options))


def say(role: str, text: str, **fields: Any) -> AgentMessage:
    """Make a message of text."""
    return AgentMessage(Role(role), (TextPart(text),) if text else (), **fields)


async def ask(session: AgentSession, *messages: AgentMessage, deliver: bool = True, **fields: Any) -> ModelTurn:
    """Return the model's answer to a conversation, as the agent receives it."""
    request = AgentRequest("test", messages, **fields)
    pending = await session.open_answer(request)
    turn = await pending.task
    session.close_answer(pending, delivered=deliver)
    return turn
