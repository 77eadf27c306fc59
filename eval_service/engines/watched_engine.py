"""An engine that is asked whether it lives while somebody waits for it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from eval_service.engines.base import Engine, EngineError, Listener
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.content.parts import ImagePart

CHECK_EVERY_SECONDS = 1.0
FAILED_CHECKS = 3
"""So many in a row: the engine is dead."""


class WatchedEngine:
    """An `Engine` whose turns end with EngineError when it dies, also where it would leave them without an answer, such
    as behind a connection to a machine that is gone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.max_model_len, self.vocab_size = engine.max_model_len, engine.vocab_size
        self._turns: dict[asyncio.Task[Any], EngineError | None] = {}
        """Those that wait, each with what ended it."""
        self._watching: asyncio.Task[None] | None = None
        self._dead = False

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        listen: Listener | None = None,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        if self._dead:
            await self._engine.check()
            self._dead = False
        turn = asyncio.current_task()
        if turn is None:
            raise RuntimeError("an engine is asked inside a task")
        self._turns[turn] = None
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            if images:
                return await self._engine.generate(prompt_ids, sampling_params, request_id, listen, images)
            return await self._engine.generate(prompt_ids, sampling_params, request_id, listen)
        except asyncio.CancelledError:
            error = self._turns[turn]
            if error is None:
                raise
            if sys.version_info >= (3, 11):
                turn.uncancel()
            raise EngineError(f"the engine died: {error}") from error
        finally:
            del self._turns[turn]

    async def check(self) -> None:
        await self._engine.check()

    async def close(self) -> None:
        await self._engine.close()

    async def _watch(self) -> None:
        failed = 0
        while self._turns:
            await asyncio.sleep(CHECK_EVERY_SECONDS)
            try:
                await self._engine.check()
                failed = 0
            except EngineError as error:
                failed += 1
                if failed >= FAILED_CHECKS:
                    self._end_turns(error)
                    failed = 0

    def _end_turns(self, error: EngineError) -> None:
        self._dead = True
        for turn in self._turns:
            self._turns[turn] = error
            turn.cancel()
