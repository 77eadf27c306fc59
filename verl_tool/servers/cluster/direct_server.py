"""A replica's HTTP servers: one at a port of its own, by which peers and `ToolClient` reach just this replica, and one
at the server's port, which the replicas of a node share so that the kernel spreads connections over them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import select
import socket
import time
from collections.abc import Iterator

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from verl_tool.http.http_protocol import BoundedHttp
from verl_tool.http.listening_socket import BACKLOG, base_url
from verl_tool.http.messages import HttpError, error_response
from verl_tool.servers.replica.router import PEER_KEY_HEADER

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 90
"""An idle connection is kept longer than any of our clients keeps it, so that it is never closed under a request."""
PONG_SECONDS = 120.0
"""A WebSocket whose client answers no ping for so long is closed. Trainers block their event loops for a while."""
BACKLOG_SECONDS = 0.5
"""A server that stops accepts what waits for at most so long."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: those are the process's own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class DirectServer:
    """Serves an application on a bound socket, of TCP or Unix, in the running event loop."""

    def __init__(
        self, listener: socket.socket, http: type[BoundedHttp] = BoundedHttp, *, max_message_bytes: int | None = None
    ) -> None:
        """max_message_bytes: of a WebSocket message; None: there are no WebSockets."""
        self._socket, self._http, self._max_message_bytes = listener, http, max_message_bytes
        name = listener.getsockname()
        self.url = name if listener.family is socket.AF_UNIX else base_url(*name[:2])
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self, app: ASGIApp) -> None:
        """Begin to serve."""
        config = uvicorn.Config(
            app,
            http=self._http,
            ws="none" if self._max_message_bytes is None else "websockets-sansio",
            ws_max_size=self._max_message_bytes or 0,
            ws_ping_timeout=PONG_SECONDS,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            log_level=None,
            access_log=False,
            # Nobody stands before it whose word on where a request came from would count.
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            backlog=BACKLOG,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise OSError(f"the direct server at {self.url} ended at its start")
            await asyncio.sleep(0.01)

    def is_open(self) -> bool:
        """Whether it still serves."""
        return self._serving is not None and not self._serving.done()

    async def stop_accepting(self) -> None:
        """Take no further connection; those that are open, and those that wait to be accepted, are served."""
        if self._server is None or self._server.should_exit:
            return
        if not self._server.started:
            # It has no connection yet, and gets none.
            self._server.should_exit = True
            return
        # An event loop accepts one or more connections a turn: until none waits, and two turns for their first read.
        backlog, end = select.poll(), time.monotonic() + BACKLOG_SECONDS
        backlog.register(self._socket, select.POLLIN)
        while backlog.poll(0) and time.monotonic() < end:  # noqa: ASYNC110  no event tells of it
            await asyncio.sleep(0)
        for _ in range(2):
            await asyncio.sleep(0)
        for listening in self._server.servers:
            listening.close()

    async def close(self, grace_seconds: float) -> None:
        """Take nothing new, end what runs, at most for `grace_seconds`."""
        if self._server is None or self._serving is None:
            self._socket.close()
            return
        self._server.should_exit = True
        try:
            await asyncio.wait_for(self._serving, timeout=grace_seconds)
        except asyncio.TimeoutError:
            logger.warning(
                "the direct server at %s had requests after %g s and was closed on them", self.url, grace_seconds
            )
        finally:
            self._socket.close()


def guarded(app: ASGIApp, peer_key: str) -> ASGIApp:
    """`app` for those only that show `peer_key`: a direct server on a network, of a server that has no API key."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        provided = Headers(scope=scope).get(PEER_KEY_HEADER, "")
        if hmac.compare_digest(provided.encode(), peer_key.encode()):
            await app(scope, receive, send)
        else:
            refusal = HttpError(401, "unauthorized", "this address is for replicas only; use the server's port")
            await error_response(refusal)(scope, receive, send)

    return guard
