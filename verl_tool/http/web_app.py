"""What the HTTP applications of this project have in common: the tool server's and the eval service's.

Starlette finds a request's route, takes part in the server's start and stop, and writes answers and streams. What a
request meets on the way is ours: the check of its headers and key, bounds on its body, the end of its work once the
client has left, the form of errors, and metrics.

Of Starlette this uses `Router`, `Route` and the responses. Its application class, its middleware and functions as
endpoints make several closures and objects for each request: CPU time of a no-op tool call, one a request on the direct
server, relative to routes and answers written by hand: 1.04 as it is, 1.22 with those (medians of 40 pairs).
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
"""KubeRay's probe of a node: status 200 and the body ``success``. Like `HEALTH_PATH`, it asks for no key."""
_REQUEST = "verl_tool.request"
"""Entry of a scope: its `Request`."""


class Request:
    """A request on its way through a `WebApp`. It does not know its scope, which knows it: a circle would have to be
    found by the garbage collector."""

    __slots__ = ("body", "headers", "path_params", "response")

    headers: HeaderMap
    path_params: Mapping[str, str]
    """What the route's path leaves open."""
    response: Response
    """What the handler gave."""

    def __init__(self) -> None:
        self.body = b""
        """The whole of it, once the handler is called."""


Handler = Callable[[Request], Awaitable[Response]]


class WebApp:
    """An ASGI application.

    `routes`: method, path and handler of each; a handler may raise `HttpError`. `names`: headers by which a request may
    name whom it is for, with this server's own values, which every answer bears; one that names another is refused.
    `tokens`: bearer tokens, of which every route but `HEALTH_PATH` and `PROBE_PATH` asks;
    none: no route does. `keyed_below`: below this path handlers check keys of their own. `host_check`: by
    which names clients may call; None: by any.
    """

    unauthorized = "unauthorized"
    """The word for programs in the error about a missing or wrong key."""

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
        # With an `app`, Starlette raises what it refuses, and does not answer it.
        scope["app"] = self
        if scope["type"] != "http":
            # The server's start or stop, or a WebSocket, which is closed.
            await self._router(scope, receive, send)
            return
        began = time.perf_counter()
        # Nothing else of the path counts: below which prefix this is mounted, and whether it ends with a slash.
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
        """From now on each answer closes its connection, so that clients come back to whoever serves then."""
        self._own_headers.append((b"connection", b"close"))

    def error_response(self, error: HttpError) -> Response:
        """How an error is told."""
        return error_response(error)

    def as_http_error(self, error: Exception) -> HttpError:
        """What to tell of something that a handler raised."""
        if isinstance(error, HttpError):
            return error
        # The last line of defence: a bug of ours must not leave a client without an answer.
        log.error("a request failed", exc_info=error)
        return HttpError(500, "internal", "the server failed; its log holds the traceback")

    def client_left(self) -> None:
        """A client did not wait for its answer."""

    async def _respond(self, scope: Scope, request: Request, receive: Receive, send: Send) -> Response:
        """The handler's answer, or the error that it raised. Raises Disconnected."""
        try:
            self._check(scope, request)
            # Starlette's part: it finds the route, whose `_Endpoint` sets the answer.
            await self._router(scope, receive, send)
        except HTTPException as error:
            return self.error_response(self._no_route(scope, error))
        except Disconnected:
            raise
        except Exception as error:  # noqa: BLE001  # told, or logged
            return self.error_response(self.as_http_error(error))
        return request.response

    def _check(self, scope: Scope, request: Request) -> None:
        """Raises HttpError for what nobody is to serve, whatever its path."""
        headers = request.headers = headers_of(scope)
        if self._host_check is not None:
            self._host_check.reject_foreign(scope, headers)
        for name, own in self._names:
            meant = headers.get(name, own)
            # Ports change hands: what was meant for another server or replica is not run here.
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
    """Where Starlette's route leads: reads the body and has the handler answer."""

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
    # Starlette answers HEAD wherever it answers GET, with the work of the whole answer.
    route.methods = {method}
    return route


def _route_of(scope: Scope) -> str:
    """The path of its route; ``other`` for what was refused before it came to one, so never a caller's text."""
    return scope["route"].path if "route" in scope else "other"
