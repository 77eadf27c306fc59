"""Tokens of an answer, the model's and the tools' apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_tool.agent_loop.trajectory import Author, Trajectory


@dataclass(frozen=True)
class Usage:
    """Counts of one request. The prompt counts once, whatever `n` is."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    tool_tokens: int = 0
    """Tokens between the model's turns: tool output, and the chat template's tokens around it."""
    tool_calls: int = 0
    """Actions that the tools answered."""

    def as_dict(self) -> dict[str, int]:
        """OpenAI's fields and ours. The total counts tool tokens too: the model has read them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "tool_tokens": self.tool_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens + self.tool_tokens,
            "tool_calls": self.tool_calls,
        }


def usage_of(trajectories: Sequence[Trajectory], answers_a_prompt: int) -> Usage:
    """The usage of a request; its trajectories come prompt by prompt, `answers_a_prompt` of each."""
    written = sum(len(s.tokens) for t in trajectories for s in t.response if s.author is Author.MODEL)
    response = sum(len(s.tokens) for t in trajectories for s in t.response)
    prompts = sum(len(t.prompt_ids) for t in trajectories[::answers_a_prompt])
    return Usage(prompts, written, response - written, sum(len(t.calls) for t in trajectories))
