"""Keeps the log-probabilities of a trajectory's turns, for answers that are sent at once."""

from __future__ import annotations

from collections.abc import Sequence

from eval_service.engines.base import Piece, TokenLogProb
from verl_tool.protocol import StepResult


class Recorder:
    """A `Witness` that listens to the model only."""

    def __init__(self) -> None:
        self.turns: list[list[TokenLogProb]] = []
        """One list a turn in which the model wrote something."""
        self._turn: list[TokenLogProb] = []

    async def wrote(self, piece: Piece) -> None:
        self._turn += piece.log_probs or ()

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
