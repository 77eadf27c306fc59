"""Send requests directly to the engine if there is only one. Written for verl 0.9.0 and 0.9.1."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient


class SoleEngineClient(LLMServerClient):
    """verl's client for a fixed set of engines. If there is only one engine, it bypasses the load balancer.

    The balancer is an actor that is called twice per turn. With one engine it has nothing to choose, and on a small
    machine it uses as much CPU as the engine's server.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._engines: int | None = None
        """Number of engines; None until it is queried."""
        self._sole: tuple[str, Any] | None = None
        """Name and handle of the only engine."""

    async def _acquire_server(self, request_id: str, **details: Any) -> tuple[str, Any]:
        # verl 0.9.1 passes details of the request to balancers that use them.
        if self._engines is None:
            self._engines = len(await self._load_balancer.get_all_servers.remote())
        if self._engines != 1:
            return await super()._acquire_server(request_id, **details)
        if self._sole is None:
            self._sole = await super()._acquire_server(request_id, **details)
        return self._sole

    def _release_server(self, server_id: str, **details: Any) -> None:
        if self._sole is None:
            super()._release_server(server_id, **details)


def direct_client(client: Any) -> Any:
    """Return the client to use in place of verl's `client`.

    verl's asynchronous trainers add and remove engines while they run. Their client, another class, is not replaced.
    """
    if type(client) is not LLMServerClient:
        return client
    return SoleEngineClient(client.config, client._load_balancer)
