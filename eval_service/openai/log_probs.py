"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval_service.engines.base import TokenChunk, TokenLogProb
from eval_service.episode_adapter import StreamObserver
from verl_tool.agent_loop.tokenizer import HFTokenizer, Tokenizer


class LogprobCollector(StreamObserver):
    """Keeps the log-probabilities of a trajectory's turns, for an answer that is sent at once."""

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


def chat_log_probs(entries: Sequence[TokenLogProb], tokenizer: Tokenizer) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat."""
    return {
        "content": [
            _spelled(entry.token_id, entry.log_prob, tokenizer)
            | {"top_logprobs": [_spelled(token, log_prob, tokenizer) for token, log_prob in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


class CompletionLogProbs:
    """``choices[].logprobs`` of completions, grown chunk by chunk. Tokens of tools have none (null)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def written(self, entries: Sequence[TokenLogProb]) -> dict[str, Any]:
        tokens = [self._tokenizer.decode([entry.token_id]) for entry in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entry.log_prob) for entry in entries],
            "top_logprobs": [
                {self._tokenizer.decode([token]): finite(log_prob) for token, log_prob in entry.top}
                for entry in entries
            ],
            "text_offset": self._offsets(tokens),
        }

    def appended(self, token_ids: Sequence[int]) -> dict[str, Any]:
        tokens = [self._tokenizer.decode([token]) for token in token_ids]
        nothing = [None] * len(tokens)
        return {
            "tokens": tokens,
            "token_logprobs": nothing,
            "top_logprobs": nothing,
            "text_offset": self._offsets(tokens),
        }

    def _offsets(self, tokens: Sequence[str]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return offsets


def joined(columns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for chunk in columns for value in chunk[name]] for name in names}


def finite(log_prob: float) -> float:
    """JSON has no minus infinity; OpenAI writes -9999 for a token that is all but impossible."""
    return max(log_prob, -9999.0)


def _spelled(token_id: int, log_prob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    token = tokenizer.decode([token_id])
    # A part of a character shows as U+FFFD, of which the bytes are others than the token's.
    spelled = tokenizer.bytes_of(token_id) if isinstance(tokenizer, HFTokenizer) else token.encode()
    return {"token": token, "logprob": finite(log_prob), "bytes": None if spelled is None else list(spelled)}
