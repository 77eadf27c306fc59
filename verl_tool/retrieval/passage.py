"""What is indexed and found: passages."""

from __future__ import annotations

from dataclasses import dataclass

from verl_tool.errors import VerlToolError


class RetrievalError(VerlToolError):
    """A corpus cannot be read, or an index cannot be built, opened or searched."""


@dataclass(frozen=True)
class Passage:
    """One passage, in the form that Search-R1 gave its corpora."""

    id: str
    contents: str
    """The title, a newline, and the text."""

    @property
    def title(self) -> str:
        """The first line."""
        return self.contents.split("\n", 1)[0]

    @property
    def text(self) -> str:
        """All but the first line."""
        return self.contents.partition("\n")[2]


@dataclass(frozen=True)
class Hit:
    number: int
    """Its place in the corpus, from 0."""
    score: float
    """The larger, the better; comparable within one query only."""
