"""Leave an engine that stopped sampling. Written for verl 0.9.0; verl 0.9.1 has engines that reject requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput

CHECK_SECONDS = 5.0
"""Time between two checks whether the engine of an open request is still in the pool."""


class ChangingEnginesClient(FullyAsyncLLMServerClient):
    """verl's client for a changing set of engines, which takes a request back from an engine that left the set.

    The trainer removes its own engine from the pool, aborts its requests and pauses it. A request whose engine was
    chosen before the removal, but which reaches the engine after the abort, waits until that engine samples again: at
    the next validation, or never (https://github.com/verl-project/verl/issues/7865).
    """

    async def _acquire_server(self, request_id: str, **details: Any) -> tuple[str, Any]:
        server_id, engine = await super()._acquire_server(request_id, **details)

        async def generate(**request: Any) -> TokenOutput:
            return await self._answer_or_abort(server_id, engine.generate.remote(**request))

        return server_id, SimpleNamespace(generate=SimpleNamespace(remote=generate))

    async def _answer_or_abort(self, server_id: str, answer: Any) -> TokenOutput:
        """Wait for the answer. Returns that the request was aborted if the engine is missing in two checks.

        Between them, requests that the engine does abort return with their tokens.
        """

        async def receive() -> TokenOutput:
            return await answer

        receiving, missing = asyncio.create_task(receive()), False
        try:
            while not (await asyncio.wait({receiving}, timeout=CHECK_SECONDS))[0]:
                was_missing, missing = missing, server_id not in await self._load_balancer.get_all_servers.remote()
                if was_missing and missing:
                    return TokenOutput(token_ids=[], stop_reason="aborted")
            return receiving.result()
        finally:
            receiving.cancel()
