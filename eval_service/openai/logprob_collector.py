"""Keeps the log-probabilities of a trajectory's turns, for answers that are sent at once."""

from __future__ import annotations

from collections.abc import Sequence

from eval_service.engines.base import TokenChunk, TokenLogProb
from verl_tool.protocol import StepResult


class LogprobCollector:
    """A `StreamObserver` that listens to the model only."""

    def __init__(self) -> None:
        self.turns: list[list[TokenLogProb]] = []
        """One list a turn in which the model wrote something."""
        self._turn: list[TokenLogProb] = []

    async def wrote(self, chunk: TokenChunk) -> None:
        self._turn += chunk.log_probs or ()

    async def turn_over(self) -> None:
        if self._turn:
            self.turns.append(self._turn)
            self._turn = []

    async def called(self, action: str) -> None:
        pass

    async def answered(self, result: StepResult) -> None:
        pass

    async def appended(self, token_ids: Sequence[int]) -> None:
        pass
