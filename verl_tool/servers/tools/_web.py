"""What the tools that ask the web have in common: what was answered before, and what a run without the web answers."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from verl_tool.servers.tools.base import ToolOptions
from verl_tool.web.answer_store import AnswerStore

_DAY = 86400.0


class WebOptions(ToolOptions):
    """Where answers are kept."""

    cache: Path | None = None
    """Folder of answers, which any number of servers may share; None keeps some in memory for ten minutes."""
    max_age_days: float | None = Field(default=None, gt=0)
    """Older answers are asked for again; None: none are."""
    replay: bool = False
    """Answer from `cache` alone; nothing is sent to the web."""
    max_concurrent: int = Field(default=16, ge=1)
    """Requests under way at once, of each replica."""

    @model_validator(mode="after")
    def _replay_of_something(self) -> WebOptions:
        if self.replay and self.cache is None:
            raise ValueError("replay answers from recorded answers; give their folder as the option cache")
        return self

    def new_store(self) -> AnswerStore:
        age = None if self.max_age_days is None else self.max_age_days * _DAY
        return AnswerStore(self.cache, age, self.replay)
