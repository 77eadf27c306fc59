"""HTTP servers of a test, on a free port of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Self

from aiohttp import web


@asynccontextmanager
async def serve(*routes: web.RouteDef) -> AsyncIterator[str]:
    """Yield the URL at which the routes are served."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class LocalServer:
    """Serves its `routes` at `url` within an ``async with`` block."""

    url = ""

    def routes(self) -> Iterable[web.RouteDef]:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        self._exits = AsyncExitStack()
        self.url = await self._exits.enter_async_context(serve(*self.routes()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._exits.aclose()
