"""What a record tells of a session: its answers as a tree, also those that are in no training row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_tool.gateway.session_tree import ModelTurn

SESSION = "session"
"""Of a record's ``extra``: the session that it is of."""
MAX_ANSWERS = 1000
"""Answers that are described, the first ones."""
MAX_AGENTS = 100
_MAX_NAME, _MAX_TEXT = 100, 500
"""Characters of a sub-agent's name, and of an answer that is in no row."""


def describe_answers(
    turns: Sequence[ModelTurn], uses: Mapping[int, str], segments: Mapping[int, int], agents: Sequence[str]
) -> dict[str, Any]:
    """The answers as JSON values. uses: by number, of those that are in no row, why; segments: by number, of the
    others, which of the record's segments they are. agents: names of sub-agents, in the order of their numbers."""
    numbers = {"": 0} | {name: number for number, name in enumerate(agents, 1)}
    return {
        "agents": [name[:_MAX_NAME] for name in agents[:MAX_AGENTS]],
        "answers": [
            _describe(turn, uses.get(turn.number), segments.get(turn.number), numbers[turn.agent_id])
            for turn in turns[:MAX_ANSWERS]
        ],
        "more_answers": max(0, len(turns) - MAX_ANSWERS),
    }


def _describe(turn: ModelTurn, use: str | None, segment: int | None, agent: int) -> dict[str, Any]:
    """One answer. What is not so, or is as usual, is left out."""
    described: dict[str, Any] = {
        "parent": None if turn.parent is None else turn.parent.number,
        "dialect": turn.dialect,
        "agent": agent,
        "prompt_tokens": turn.answer.prompt_tokens,
        "tokens": len(turn.generation.token_ids),
        "finish": turn.answer.finish.value,
        "calls": [call.name[:_MAX_NAME] for call in turn.answer.calls[:10]],
    }
    if segment is not None:
        described["segment"] = segment
    else:
        described |= {"unused": use, "text": turn.answer.text[:_MAX_TEXT]}
    others = {"edited": turn.came_back_edited, "foreign": turn.foreign, "retries": turn.attempts - 1}
    return described | {name: value for name, value in others.items() if value}
