"""Answers of ``/v1/chat/completions``.

At once: ``message.content`` is what the model wrote in its last turn, all calls done.

As a stream: all that the model writes comes as ``delta.content``, but not a summary of its context. Where a turn turns
out to be an action, a delta with ``tool_calls`` follows, and one with ``tool_messages`` that holds what the tools
gave. Such a message is OpenAI's (role, tool_call_id, content; of an observation with images a list of parts, as in a
request, with data URIs), but it does not come as ``content``: a client that puts all ``content`` together gets the
model's words and nobody else's. What follows the last tool message is the answer. A tool that merely ends the
trajectory, without a word, sends none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from eval_service.engines.base import TokenChunk, TokenLogProb
from eval_service.openai.log_probs import chat_log_probs
from eval_service.openai.response_builder import ending
from eval_service.openai.streaming.choice_stream import ChoiceStream
from eval_service.openai.streaming.text_stream import turn_text
from eval_service.openai.tool_calls import CallLog
from eval_service.openai.usage import Usage
from eval_service.service import Service
from verl_tool.agent_loop.trajectory import Author, Trajectory
from verl_tool.content.parts import TextPart, parts_of
from verl_tool.errors import ContentError
from verl_tool.protocol import StepResult


def chat_choice(
    index: int,
    trajectory: Trajectory,
    service: Service,
    stops: Sequence[str],
    log_probs: Sequence[Sequence[TokenLogProb]] | None,
    with_trajectory: bool,
) -> dict[str, Any]:
    """One entry of ``choices``. `log_probs`: a list a turn of the model, if they were asked for."""
    written = [segment for segment in trajectory.response if segment.author is Author.MODEL]
    last = max((place for place, segment in enumerate(written) if segment.is_turn), default=None)
    tokens = () if last is None else written[last].tokens
    content = turn_text(tokens, service.tokenizer, service.end_token_ids, stops)
    entries = None if log_probs is None else () if last is None else log_probs[last]
    return {
        "index": index,
        "message": {"role": "assistant", "content": content},
        "logprobs": None if entries is None else chat_log_probs(entries, service.tokenizer),
    } | ending(trajectory, with_trajectory)


class ChatStream(ChoiceStream):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._calls = CallLog(self._job.trajectory_id, self._job.formats or self._service.formats)
        self._begun = False
        self._in_summary = False

    async def summary_begins(self) -> None:
        self._in_summary = True

    async def wrote(self, chunk: TokenChunk) -> None:
        if self._in_summary:
            return
        text = self._turn.push(chunk.token_ids)
        if text or chunk.log_probs:
            log_probs = chat_log_probs(chunk.log_probs, self._service.tokenizer) if chunk.log_probs else None
            await self._send({"content": text}, log_probs)

    async def turn_over(self) -> None:
        text = self._turn.finish()
        self._turn, self._in_summary = self._new_turn(), False
        if text:
            await self._send({"content": text})

    async def called(self, action: str) -> None:
        calls = self._calls.calls_in(action)
        if calls:
            await self._send({"tool_calls": calls})

    async def answered(self, result: StepResult) -> None:
        if not result.observation and not result.image and result.done:
            return
        image = result.image if self._service.image_tokens is not None else None
        try:
            parts = parts_of(result.observation, image)
        except ContentError:  # the loop ends the trajectory for it
            parts = [TextPart(result.observation)]
        if image is None:
            await self._send({"tool_messages": [self._calls.message(parts)]})
        else:
            await self._send({"tool_messages": [await asyncio.to_thread(self._calls.message, parts)]})

    async def finished(self, trajectory: Trajectory, with_trajectory: bool, usage: Usage | None) -> None:
        choice = {"index": self._index, "delta": {} if self._begun else {"role": "assistant", "content": ""}}
        await self._put(choice | ending(trajectory, with_trajectory), usage)

    async def _send(self, delta: dict[str, Any], log_probs: dict[str, Any] | None = None) -> None:
        if not self._begun:
            self._begun = True
            delta = {"role": "assistant"} | delta
        choice: dict[str, Any] = {"index": self._index, "delta": delta, "finish_reason": None}
        if log_probs is not None:
            choice["logprobs"] = log_probs
        await self._put(choice)
