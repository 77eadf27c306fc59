"""The engine of agents' sessions: its answers are admitted, limited in time and counted as those of chats are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from eval_service.metrics import ServiceMetrics
from eval_service.service import MODEL_PLACE, Service
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.http.messages import HttpError
from verl_tool.util.deadline import Deadline


class SessionEngine:
    """A `Generator` over the engine of `service`. `admit` takes one answer into the service's queue, or raises
    HttpError. `timeout_seconds` is the deadline of one answer, with its time in the queue."""

    def __init__(
        self, service: Service, metrics: ServiceMetrics, admit: Callable[[int], None], timeout_seconds: float
    ) -> None:
        self._service, self._metrics, self._admit, self._timeout = service, metrics, admit, timeout_seconds

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold the place of one answer. Raises HttpError 503 if the queue is full, 504 at the deadline."""
        admission, until = self._service.admission, time.monotonic() + self._timeout
        self._admit(1)
        try:
            with Deadline(self._timeout):
                async with admission.place(MODEL_PLACE):
                    yield
        except asyncio.TimeoutError:
            if time.monotonic() < until:  # the session's own limit
                raise
            raise HttpError(504, "timeout", f"no answer within {self._timeout:g} s; it was stopped") from None
        finally:
            admission.release(1)

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        """As `Generator.generate`, with its tokens and seconds in the metrics."""
        began = time.perf_counter()
        generation = await self._service.engine.generate(prompt_ids, sampling_params, request_id)
        self._metrics.sampled(len(prompt_ids), generation, time.perf_counter() - began)
        return generation
