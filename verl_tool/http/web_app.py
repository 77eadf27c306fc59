"""The base of this project's HTTP applications: the tool server and the eval service.

Starlette routes requests, handles the server's start and stop, and writes responses and streams. This module checks
headers and API keys, limits bodies, cancels work when the client disconnects, formats errors, and counts metrics.

It uses Starlette's `Router`, `Route` and responses only. Starlette's application class, middleware and function
endpoints create several closures and objects per request. The CPU time of a no-op tool call, relative to hand-written
routes and responses, is 1.04 without them and 1.22 with them (medians of 40 pairs, one call per request, direct
server).
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from verl_tool.http.disconnect import until_disconnect
from verl_tool.http.event_stream import EventStream
from verl_tool.http.host_check import HostCheck
from verl_tool.http.messages import Disconnected, HeaderMap, HttpError, error_response, headers_of, path_of
from verl_tool.http.metrics import HttpMetrics
from verl_tool.http.request_body import RequestBodies
from verl_tool.protocol import MISDIRECTED

log = logging.getLogger(__name__)
access_log = logging.getLogger(f"{__name__}.access")

HEALTH_PATH = "/health"
PROBE_PATH = "/-/healthz"
"""KubeRay's probe of a node, answered with status 200 and ``success``. Like `HEALTH_PATH`, it needs no key."""
_REQUEST = "verl_tool.request"
"""Key of the `Request` in a scope."""


class Request:
    """A request to a `WebApp`. It has no reference to its scope, which refers to it, because the garbage collector
    would have to find the cycle."""

    __slots__ = ("body", "headers", "path_params", "response")

    headers: HeaderMap
    path_params: Mapping[str, str]
    """Values of the path parameters."""
    response: Response
    """The handler's response."""

    def __init__(self) -> None:
        self.body = b""
        """The whole body, set before the handler is called."""


Handler = Callable[[Request], Awaitable[Response]]


class WebApp:
    """An ASGI application.

    `routes` are tuples of method, path and handler. Handlers may raise `HttpError`. `names` are headers with which a
    request may name the intended server, with this server's values. Every response has them, and a request that names
    another server is rejected. `tokens` are the accepted bearer tokens for all routes except `HEALTH_PATH`,
    `PROBE_PATH` and those below `keyed_below`, whose handlers check keys of their own; without tokens, no route needs
    one.
    `host_check` checks the names by which clients call the server.
    """

    unauthorized = "unauthorized"
    """Type of the error about a missing or wrong key."""

    def __init__(
        self,
        routes: Sequence[tuple[str, str, Handler]],
        metrics: HttpMetrics,
        bodies: RequestBodies,
        *,
        names: Mapping[str, str] | None = None,
        tokens: Sequence[str] = (),
        keyed_below: str = "",
        host_check: HostCheck | None = None,
    ) -> None:
        self.bodies = bodies
        self._router = Router([_route(*route, bodies) for route in routes], redirect_slashes=False)
        self._known = ", ".join(f"{method} {path}" for method, path, _ in routes)
        self._metrics = metrics
        self._names = [(name.encode(), own.encode()) for name, own in (names or {}).items()]
        self._own_headers = [(name, own) for name, own in self._names if own]
        self._tokens = [f"Bearer {token}".encode() for token in tokens]
        self._host_check = host_check
        self._keyed_below = f"{keyed_below}/" if keyed_below else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        # With an `app`, Starlette raises an exception for requests that it rejects, and does not answer them.
        scope["app"] = self
        if scope["type"] != "http":
            # Start or stop of the server, or a WebSocket, which is closed.
            await self._router(scope, receive, send)
            return
        began = time.perf_counter()
        # Ignore the prefix of the mount point, and a trailing slash.
        scope["path"], scope["root_path"] = path_of(scope), ""
        request = scope[_REQUEST] = Request()
        try:
            response = await self._respond(scope, request, receive, send)
            response.raw_headers += self._own_headers
            await response(scope, receive, send)
        except Disconnected:
            self.client_left()
        else:
            self._account(scope, request, response, time.perf_counter() - began)
        finally:
            self.bodies.release(len(request.body))

    def dismiss_connections(self) -> None:
        """Close connections after each response from now on, so that clients reconnect to another replica."""
        self._own_headers.append((b"connection", b"close"))

    def error_response(self, error: HttpError) -> Response:
        """Convert an error to a response."""
        return error_response(error)

    def as_http_error(self, error: Exception) -> HttpError:
        """Map a handler exception to an HTTP error."""
        if isinstance(error, HttpError):
            return error
        # The last resort: a bug must not leave a client without a response.
        log.error("a request failed", exc_info=error)
        return HttpError(500, "internal", "the server failed; its log holds the traceback")

    def client_left(self) -> None:
        """Called when a client has disconnected before its response."""

    async def _respond(self, scope: Scope, request: Request, receive: Receive, send: Send) -> Response:
        """Return the handler's response, or the error that it raised as one. Raises Disconnected."""
        try:
            self._check(scope, request)
            # Starlette finds the route, whose `_Endpoint` sets the response.
            await self._router(scope, receive, send)
        except HTTPException as error:
            return self.error_response(self._no_route(scope, error))
        except Disconnected:
            raise
        except Exception as error:  # noqa: BLE001  # told, or logged
            return self.error_response(self.as_http_error(error))
        return request.response

    def _check(self, scope: Scope, request: Request) -> None:
        """Raise HttpError for a request that must not be served on any path."""
        headers = request.headers = headers_of(scope)
        if self._host_check is not None:
            self._host_check.reject_foreign(scope, headers)
        for name, own in self._names:
            meant = headers.get(name, own)
            # Another server or replica may have used this port before. Do not run requests for it.
            if meant != own:
                named = meant[:80].decode("latin-1")
                message = f"this is {own.decode()!r} and {name.decode()} names {named!r}; ask the server's port anew"
                raise HttpError(MISDIRECTED, "misdirected", message)
        path = scope["path"]
        own_key = bool(self._keyed_below) and f"{path}/".startswith(self._keyed_below)
        if self._tokens and path not in (HEALTH_PATH, PROBE_PATH) and not own_key:
            provided = headers.get(b"authorization", b"")
            if not any(hmac.compare_digest(provided, token) for token in self._tokens):
                message = "the api key is missing or wrong; send the header 'Authorization: Bearer <api_key>'"
                raise HttpError(401, self.unauthorized, message, headers={"www-authenticate": "Bearer"})

    def _no_route(self, scope: Scope, error: HTTPException) -> HttpError:
        path = scope["path"][:80]
        if error.status_code == 404:
            return HttpError(404, "unknown_path", f"there is no {path!r} here; known: {self._known}")
        allowed = (error.headers or {})["Allow"]
        message = f"{path} takes {allowed}, not {scope['method'][:20]!r}"
        return HttpError(405, "wrong_method", message, headers={"allow": allowed})

    def _account(self, scope: Scope, request: Request, response: Response, seconds: float) -> None:
        route, status, bytes_in = _route_of(scope), response.status_code, len(request.body)
        bytes_out = response.bytes_out if isinstance(response, EventStream) else len(response.body)
        self._metrics.answered(route, status, seconds, bytes_in, bytes_out)
        if access_log.isEnabledFor(logging.DEBUG):
            access_log.debug(
                "method=%s route=%s status=%d seconds=%.6f bytes_in=%d bytes_out=%d",
                scope["method"], route, status, seconds, bytes_in, bytes_out,
            )  # fmt: skip


class _Endpoint:
    """Endpoint of a Starlette route: reads the body and calls the handler."""

    def __init__(self, handler: Handler, bodies: RequestBodies) -> None:
        self._handler = handler
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: Request = scope[_REQUEST]
        request.path_params = scope["path_params"]
        request.body = await self._bodies.read(scope, request.headers, receive)
        request.response = await until_disconnect(self._handler(request), receive)


def _route(method: str, path: str, handler: Handler, bodies: RequestBodies) -> Route:
    route = Route(path, _Endpoint(handler, bodies), methods=[method])
    # Starlette would also answer HEAD on GET routes, at the cost of the whole response.
    route.methods = {method}
    return route


def _route_of(scope: Scope) -> str:
    """Return the path of the route, or ``other`` if the request was rejected before routing. It is never caller
    text."""
    return scope["route"].path if "route" in scope else "other"
