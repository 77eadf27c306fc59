"""Answers of ``/v1/completions``: the text behind the prompt, the model's and the tools' in the order of the tokens.

In a stream, text that the model did not write is marked by ``"author": "tool"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval_service.engines.base import TokenChunk, TokenLogProb
from eval_service.openai.log_probs import CompletionLogProbs, joined
from eval_service.openai.response_builder import ending
from eval_service.openai.streaming.choice_stream import ChoiceStream
from eval_service.openai.streaming.text_stream import TurnText
from eval_service.openai.usage import Usage
from eval_service.service import Service
from verl_tool.agent_loop.trajectory import Author, Trajectory


def completion_choice(
    index: int,
    trajectory: Trajectory,
    service: Service,
    stops: Sequence[str],
    log_probs: Sequence[Sequence[TokenLogProb]] | None,
    with_trajectory: bool,
) -> dict[str, Any]:
    """One entry of ``choices``. `log_probs`: a list a turn of the model, if they were asked for."""
    text = _text(trajectory, service, stops)
    columns = None if log_probs is None else _columns(trajectory, log_probs, CompletionLogProbs(service.tokenizer))
    return {"index": index, "text": text, "logprobs": columns} | ending(trajectory, with_trajectory)


class CompletionStream(ChoiceStream):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._log_probs = CompletionLogProbs(self._service.tokenizer)
        self._with_log_probs = False
        self._sent = 0

    async def wrote(self, chunk: TokenChunk) -> None:
        self._sent += len(chunk.token_ids)
        text = self._turn.push(chunk.token_ids)
        if text or chunk.log_probs:
            self._with_log_probs = bool(chunk.log_probs)
            await self._send(text, self._log_probs.written(chunk.log_probs) if chunk.log_probs else None)

    async def turn_over(self) -> None:
        text = self._turn.finish()
        if text:
            await self._send(text)

    async def appended(self, token_ids: Sequence[int]) -> None:
        # Only now it is known that the answer goes on behind the tokens that ended the model's turn.
        ending_text = self._service.tokenizer.decode(self._turn.ending())
        if ending_text:
            await self._send(ending_text)
        self._turn = self._new_turn()
        if not token_ids:
            return
        self._sent += len(token_ids)
        log_probs = self._log_probs.appended(token_ids) if self._with_log_probs else None
        await self._send(self._service.tokenizer.decode(token_ids), log_probs, {"author": Author.TOOL.value})

    async def finished(self, trajectory: Trajectory, with_trajectory: bool, usage: Usage | None) -> None:
        """Send what stands behind the model's last turn too."""
        rest = trajectory.response_ids[self._sent :]
        if rest:
            await self.appended(rest)
        choice = {"index": self._index, "text": ""} | ending(trajectory, with_trajectory)
        await self._put(choice, usage)

    async def _send(
        self, text: str, log_probs: dict[str, Any] | None = None, marks: dict[str, str] | None = None
    ) -> None:
        choice = {"index": self._index, "text": text, "finish_reason": None, "logprobs": log_probs} | (marks or {})
        await self._put(choice)


def _text(trajectory: Trajectory, service: Service, stops: Sequence[str]) -> str:
    """The text behind the prompt: what `CompletionStream` sends, put together."""
    parts: list[str] = []
    ending: list[int] = []  # of the model's turn, shown only if something follows
    appended: list[int] = []  # by others, decoded together as a stream does
    for segment in trajectory.response:
        if segment.author is not Author.MODEL:
            appended += segment.tokens
            continue
        parts += [service.tokenizer.decode(ending), service.tokenizer.decode(appended)]
        turn = TurnText(service.tokenizer, service.end_token_ids, stops)
        parts += [turn.push(segment.tokens), turn.finish()]
        ending, appended = turn.ending(), []
    if appended:
        parts += [service.tokenizer.decode(ending), service.tokenizer.decode(appended)]
    return "".join(parts)


def _columns(
    trajectory: Trajectory, turns: Sequence[Sequence[TokenLogProb]], log_probs: CompletionLogProbs
) -> dict[str, Any]:
    written = iter(turns)
    return joined(
        [
            log_probs.written(next(written)) if segment.author is Author.MODEL else log_probs.appended(segment.tokens)
            for segment in trajectory.response
        ]
    )
