"""The short way from a replica's HTTP server into its app, past what Serve does for every request.

Serve wraps each request that comes from HAProxy in metadata, metrics, tasks and a queue count, which costs more than to
parse, run and answer it. The app has all of that itself: metrics, admission, deadlines, disconnects. So a middleware,
which Serve lets its HTTP servers have (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``), hands requests straight to the
app of its process. Serve's own routes (``/-/healthz``, ``/-/routes``) stay Serve's.
"""

from __future__ import annotations

from starlette.middleware import Middleware

from verl_tool.servers.http import AsgiApp, Receive, Scope, Send, path_of
from verl_tool.servers.http_protocol import bound_all_servers

CALLBACK = f"{__name__}.middlewares"
"""Where Serve finds `middlewares`."""
SERVES_OWN = "/-/"
"""What the paths of Serve's own routes begin with."""

_app_here: AsgiApp | None = None


def offer(app: AsgiApp) -> None:
    """From now on the requests that reach this process's HTTP server are for `app`."""
    global _app_here
    _app_here = app


class ShortPath:
    """ASGI middleware: to the app of this process if it has one, else on to Serve."""

    def __init__(self, app: AsgiApp) -> None:
        self._serve = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        if _app_here is not None and scope["type"] == "http" and not path_of(scope).startswith(SERVES_OWN):
            await _app_here(scope, receive, send)
        else:
            await self._serve(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Serve is to put in front of an HTTP server that it is about to start, whose protocol is bounded too."""
    bound_all_servers()
    return [Middleware(ShortPath)]
