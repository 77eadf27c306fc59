"""What the streams of both ways of asking have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval_service.episode_adapter import StreamObserver
from eval_service.openai.response_builder import ResponseBuilder
from eval_service.openai.streaming.stream_buffer import StreamBuffer
from eval_service.openai.streaming.text_stream import TurnText
from eval_service.openai.usage import Usage
from eval_service.service import GenerationJob, Service
from verl_tool.agent_loop.trajectory import Trajectory


class ChoiceStream(StreamObserver):
    """Sends one choice as it grows. `stops`: the request's own stop strings, which are not sent."""

    def __init__(
        self,
        builder: ResponseBuilder,
        index: int,
        job: GenerationJob,
        service: Service,
        stops: Sequence[str],
        buffer: StreamBuffer,
    ) -> None:
        self._builder, self._index, self._job, self._buffer = builder, index, job, buffer
        self._service, self._stops = service, stops
        self._turn = self._new_turn()

    async def finished(self, trajectory: Trajectory, with_trajectory: bool, usage: Usage | None) -> None:
        """Send the choice's end; `usage` if it is the last choice."""
        raise NotImplementedError

    def _new_turn(self) -> TurnText:
        return TurnText(self._service.tokenizer, self._service.end_token_ids, self._stops)

    async def _put(self, choice: dict[str, Any], usage: Usage | None = None) -> None:
        await self._buffer.put(self._builder.chunk([choice], usage))
