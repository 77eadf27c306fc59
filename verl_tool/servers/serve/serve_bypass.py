"""The short way from a replica's HTTP server into its app, past what Serve does for every request.

Serve wraps each request that comes from HAProxy in metadata, metrics, tasks and a queue count, which costs more than to
parse, run and answer it. The app has all of that itself: metrics, admission, deadlines, disconnects. So a middleware,
which Serve lets its HTTP servers have (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``), hands requests straight to the
app of its process. Serve's own routes (``/-/healthz``, ``/-/routes``) stay Serve's.

HAProxy tells in each request which Serve and which application of it are meant. A port that it still knows may be
another server's replica by now, which then refuses.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from verl_tool.protocol import MISDIRECTED
from verl_tool.servers.api.http import RETRY_AFTER, HttpError, error_response, path_of
from verl_tool.servers.api.http_protocol import bound_all_servers

CALLBACK = f"{__name__}.middlewares"
"""Where Serve finds `middlewares`."""
SERVES_OWN = "/-/"
"""What the paths of Serve's own routes begin with."""
INGRESS_HEADER = "x-verl-tool-ingress"
"""HAProxy sets it in every request, to the name of its Serve and that of the backend (`ingress_mark`)."""
FRONT_VARIABLE = "VERL_TOOL_FRONT"
"""Environment variable of Serve's processes: the name of this Serve, if its HAProxy sets `INGRESS_HEADER`."""


@dataclass(frozen=True)
class _Place:
    """Where the app of this process is served."""

    app: ASGIApp
    front: tuple[bytes, bytes] | None
    """`INGRESS_HEADER` as it is in requests for it; None if HAProxy sets none."""
    prefix: str


_here: _Place | None = None


def ingress_mark(serve_name: str, app_name: str) -> str:
    """What `INGRESS_HEADER` says for an application: HAProxy's backends are named ``http-APPLICATION``."""
    return f"{serve_name}/http-{app_name}"


def offer(app: ASGIApp, app_name: str, route_prefix: str = "/") -> None:
    """From now on the requests that reach this process's HTTP server are for `app`."""
    global _here
    name = os.environ.get(FRONT_VARIABLE)
    front = (INGRESS_HEADER.encode(), ingress_mark(name, app_name).encode()) if name else None
    _here = _Place(app, front, route_prefix.rstrip("/"))


class ServeBypass:
    """ASGI middleware of a replica: to the app of this process if it has one, else on to Serve."""

    def __init__(self, app: ASGIApp) -> None:
        self._serve = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        place = _here
        if place is None or not _is_for_an_app(scope):
            await self._serve(scope, receive, send)
        elif place.front is not None and place.front not in scope["headers"]:
            message = "this port is a replica's of another server than the one that the request came through"
            await error_response(HttpError(MISDIRECTED, "misdirected", message))(scope, receive, send)
        else:
            if place.prefix:
                scope["root_path"] = scope.get("root_path", "") + place.prefix
            await place.app(scope, receive, send)


class NoReplica:
    """ASGI middleware of the proxy to which HAProxy turns when no replica is left: says so at once.

    Serve's own way is to wait for a replica, however long that takes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._serve = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        if not _is_for_an_app(scope):
            await self._serve(scope, receive, send)
            return
        message = "no replica is alive at the moment; send it again later"
        refusal = HttpError(503, "overloaded", message, headers=RETRY_AFTER)
        await error_response(refusal)(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Serve is to put in front of an HTTP server that it is about to start, whose protocol is bounded too."""
    bound_all_servers()
    try:
        serve.get_replica_context()
    except RayServeException:
        # With HAProxy before it, a proxy of Serve's own is asked only when there is no replica.
        return [Middleware(NoReplica)] if FRONT_VARIABLE in os.environ else []
    return [Middleware(ServeBypass)]


def _is_for_an_app(scope: Scope) -> bool:
    return scope["type"] == "http" and not path_of(scope).startswith(SERVES_OWN)
