"""The way to the engine where there is only one. Written for verl 0.9.0 and 0.9.1."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient


class SoleEngineClient(LLMServerClient):
    """verl's client, for a set of engines that stays as it is: with one, it goes there without asking the balancer.

    The balancer is an actor that is called twice a turn. With one engine it has nothing to choose, and on a small
    machine it takes as much CPU as the engine's own server.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._engines: int | None = None
        """How many there are; None: not asked yet."""
        self._sole: tuple[str, Any] | None = None
        """Name and handle of the one."""

    async def _acquire_server(self, request_id: str, **told: Any) -> tuple[str, Any]:
        # verl 0.9.1 tells the balancer of the request, if it wants to know.
        if self._engines is None:
            self._engines = len(await self._load_balancer.get_all_servers.remote())
        if self._engines != 1:
            return await super()._acquire_server(request_id, **told)
        if self._sole is None:
            self._sole = await super()._acquire_server(request_id, **told)
        return self._sole

    def _release_server(self, server_id: str, **told: Any) -> None:
        if self._sole is None:
            super()._release_server(server_id, **told)


def direct_client(client: Any) -> Any:
    """The client that is to be used in place of the one that verl hands out.

    verl's asynchronous trainers add and remove engines while they run; theirs is another class, and is left alone.
    """
    if type(client) is not LLMServerClient:
        return client
    return SoleEngineClient(client.config, client._load_balancer)
