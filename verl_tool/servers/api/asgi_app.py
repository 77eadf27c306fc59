"""The tool server as an ASGI application. Ray Serve and uvicorn run it alike.

Plain ASGI rather than a framework: the work per request is a few dictionaries, and a framework would cost more than
the rest of it. Routes: POST /get_observation, POST /run_code, GET /health, /tools, /metrics, /replicas.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.json_text import encode_json
from verl_tool.protocol import (
    MISDIRECTED,
    REPLICA_HEADER,
    SERVER_HEADER,
    Fault,
    FaultKind,
    HealthReport,
    StepRequest,
    StepResult,
    proof_of,
)
from verl_tool.sandbox_fusion import RunCodeRequest
from verl_tool.servers.api.disconnect import until_disconnect
from verl_tool.servers.api.host_check import HostCheck
from verl_tool.servers.api.http import (
    PROMETHEUS_TEXT,
    Disconnected,
    HeaderMap,
    Headers,
    HttpError,
    Receive,
    Reply,
    Scope,
    Send,
    answer_lifespan,
    headers_of,
    path_of,
    refuse_websocket,
    send_reply,
)
from verl_tool.servers.api.request_body import MAX_BODY_BYTES, RETRY_AFTER, RequestBodies
from verl_tool.servers.api.router import FORWARDED_HEADER, PEER_KEY_HEADER, LocalRouter, Router
from verl_tool.servers.api.run_code import run_code
from verl_tool.servers.api.wire import decode_model, decode_request, decoded, encode_response, encoded, size_of
from verl_tool.servers.execution.admission import Admission
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.metrics import HttpMetrics

if TYPE_CHECKING:
    from verl_tool.sandbox import SandboxPool

log = logging.getLogger(__name__)
access_log = logging.getLogger(f"{__name__}.access")

_FIELD_OF_FAULT = re.compile(r"(?:[a-z_]+\[\d+\]|tool_name)(?= )")

_FORWARDED, _PEER_KEY = FORWARDED_HEADER.encode(), PEER_KEY_HEADER.encode()

Handler = Callable[[HeaderMap, bytes], Awaitable[Reply]]


class ToolServerApp:
    """All routes over one `ToolSet`, which the caller starts and closes.

    `max_concurrent_requests`: entries (trajectories, not HTTP requests) that run at the same time. `max_queued`:
    entries that may wait beyond them; past that the answer is 503 with ``Retry-After``. `request_timeout_seconds`:
    after it, what has no answer yet is answered with the fault ``timeout``. `api_key`: every route but ``/health`` asks
    for it as a bearer token. `router`: what to do with entries that belong to another replica. `peer_key`: what the
    other replicas show; None: there are none, and no request is taken as forwarded. `host_check`: by which names
    clients may call; None: by any. `server`: the name that it goes by; a request that names another is refused.
    """

    def __init__(
        self,
        toolset: ToolSet,
        *,
        max_concurrent_requests: int = 256,
        max_queued: int = 8192,
        api_key: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        request_timeout_seconds: float = 300.0,
        router: Router | None = None,
        peer_key: str | None = None,
        host_check: HostCheck | None = None,
        bodies: RequestBodies | None = None,
        server: str = "",
    ) -> None:
        if not request_timeout_seconds > 0:
            raise ConfigError(f"request_timeout_seconds is {request_timeout_seconds}; it must be above 0")
        self.toolset = toolset
        self.admission = Admission(max_concurrent_requests, max_queued)
        self.router: Router = router or LocalRouter()
        self.server = server
        replica = self.router.replica_id.encode()
        self._names = ((SERVER_HEADER.encode(), server.encode()), (REPLICA_HEADER.encode(), replica))
        keys = () if api_key is None else (api_key, proof_of(api_key, server))
        self._tokens = tuple(f"Bearer {key}".encode() for key in keys)
        self._peer_key = None if peer_key is None else peer_key.encode()
        self._host_check = host_check
        self.bodies = bodies or RequestBodies(max_body_bytes)
        self._timeout = request_timeout_seconds
        self._metrics = HttpMetrics(toolset.metrics.registry)
        toolset.metrics.add_gauge("verl_tool_queue_length", "Actions that wait for a place.", self._queue_lengths)
        self._routes: dict[str, tuple[str, Handler]] = {
            "/get_observation": ("POST", self._get_observation),
            "/run_code": ("POST", self._run_code),
            "/health": ("GET", self._health),
            "/tools": ("GET", self._tools),
            "/metrics": ("GET", self._metrics_text),
            "/replicas": ("GET", self._replicas),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
            return
        if scope["type"] != "http":
            await refuse_websocket(receive, send)
            return
        began = time.perf_counter()
        path = path_of(scope)
        route = path if path in self._routes else "other"
        body = b""
        try:
            headers = headers_of(scope)
            handler = self._handler(scope, path, headers)
            body = await self.bodies.read(scope, headers, receive)
            reply = await until_disconnect(handler(headers, body), receive)
        except Disconnected:
            return
        except HttpError as error:
            reply = error.reply()
        except Exception:
            # The last line of defence: a bug of ours must not leave a client without an answer.
            log.exception("%s failed", route)
            reply = HttpError(500, "internal", "the server failed; its log holds the traceback").reply()
        finally:
            self.bodies.release(len(body))
        await send_reply(send, reply, self._own_headers())
        self._account(scope, route, reply, time.perf_counter() - began, len(body))

    async def run_local(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        """Run entries in this process, deadline included."""
        return await self.toolset.step(requests, timeout_seconds=self._timeout, admission=self.admission)

    def _handler(self, scope: Scope, path: str, headers: HeaderMap) -> Handler:
        if self._host_check is not None:
            self._host_check.refuse_stranger(scope, headers)
        self._refuse_misdirected(headers)
        if self._tokens and path != "/health":
            given = headers.get(b"authorization", b"")
            if not any(hmac.compare_digest(given, token) for token in self._tokens):
                message = "the api key is missing or wrong; send the header 'Authorization: Bearer <api_key>'"
                raise HttpError(401, "unauthorized", message, headers=((b"www-authenticate", b"Bearer"),))
        found = self._routes.get(path)
        if found is None:
            known = ", ".join(f"{method} {known_path}" for known_path, (method, _) in self._routes.items())
            raise HttpError(404, "unknown_path", f"there is no {path[:80]!r} here; known: {known}")
        method, handler = found
        if scope["method"] != method:
            message = f"{path} takes {method}, not {scope['method'][:20]!r}"
            raise HttpError(405, "wrong_method", message, headers=((b"allow", method.encode()),))
        return handler

    def _refuse_misdirected(self, headers: HeaderMap) -> None:
        """Ports change hands: what was meant for another server or replica is not run here."""
        for name, own in self._names:
            meant = headers.get(name, own)
            if meant != own:
                named = meant[:80].decode("latin-1")
                message = f"this is {own.decode()!r} and {name.decode()} names {named!r}; ask the ingress anew"
                raise HttpError(MISDIRECTED, "misdirected", message)

    async def _get_observation(self, headers: HeaderMap, body: bytes) -> Reply:
        began = time.perf_counter()
        forwarded = self._is_forwarded(headers)
        entries = await decoded(partial(decode_request, most=self.admission.limit), body)
        self._admit(len(entries))
        try:
            results = await self._step(entries, forwarded)
        finally:
            self.admission.release(len(entries))
        milliseconds = (time.perf_counter() - began) * 1e3
        status, error = (200, None) if forwarded else _status_of(results)
        body = await encoded(partial(encode_response, results, milliseconds, error), size_of(results))
        return Reply(body, status, headers=RETRY_AFTER if status == 503 else ())

    def _admit(self, entries: int) -> None:
        if not self.admission.admit(entries):
            limit = self.admission.limit
            message = f"the queue is full ({self.admission.inside} of {limit} entries); send it again later"
            raise HttpError(503, FaultKind.OVERLOADED.value, message, headers=RETRY_AFTER)

    async def _step(self, entries: Sequence[StepRequest | Fault], forwarded: bool) -> list[StepResult]:
        """Results of all entries in their order; the malformed ones are answered without being run."""
        good = [entry for entry in entries if isinstance(entry, StepRequest)]
        results = await (self.run_local(good) if forwarded else self.router.step(good, self.run_local))
        if len(good) == len(entries):
            return results
        answered = iter(results)
        return [
            StepResult("", valid=False, fault=entry) if isinstance(entry, Fault) else next(answered)
            for entry in entries
        ]

    async def _run_code(self, headers: HeaderMap, body: bytes) -> Reply:
        pool = self._sandbox()
        request = await decoded(partial(decode_model, model=RunCodeRequest), body)
        self._admit(1)
        try:
            async with self.admission.place("run_code"):
                answer = await asyncio.wait_for(run_code(pool, request, self._timeout), self._timeout)
        except asyncio.TimeoutError:
            message = f"no answer within {self._timeout:g} s"
            raise HttpError(504, FaultKind.TIMEOUT.value, message) from None
        finally:
            self.admission.release(1)
        size = sum(len(content) for content in answer.files.values())
        return Reply(await encoded(lambda: encode_json(answer.model_dump()), size))

    def _sandbox(self) -> SandboxPool:
        for tool in self.toolset.tools:
            if tool.sandbox is not None:
                return tool.sandbox
        names = ", ".join(tool.name for tool in self.toolset.tools)
        message = f"no tool here runs code (tools: {names}); start the server with --tool_type python_code"
        raise HttpError(404, "no_sandbox", message)

    async def _health(self, headers: HeaderMap, body: bytes) -> Reply:
        report = HealthReport(
            status="healthy",
            server=self.server,
            replica=self.router.replica_id,
            tools=[tool.name for tool in self.toolset.tools],
            running=self.admission.running,
            queued=self.admission.queued,
            trajectories=len(self.toolset),
        )
        try:
            await self.toolset.check()
        except VerlToolError as error:
            report = report.model_copy(update={"status": "unhealthy", "message": str(error)})
        if not self._is_forwarded(headers):
            report = await self.router.health(report)
        well = report.status == "healthy"
        return Reply(encode_json(report.model_dump()), 200 if well else 503, headers=() if well else RETRY_AFTER)

    async def _tools(self, headers: HeaderMap, body: bytes) -> Reply:
        return Reply(encode_json({"tools": [tool.model_dump() for tool in self.toolset.describe()]}))

    async def _metrics_text(self, headers: HeaderMap, body: bytes) -> Reply:
        text = self.toolset.metrics.exposition()
        if not self._is_forwarded(headers):
            text = await self.router.metrics(text)
        return Reply(text, content_type=PROMETHEUS_TEXT)

    async def _replicas(self, headers: HeaderMap, body: bytes) -> Reply:
        replicas = await self.router.replicas()
        return Reply(encode_json(replicas.model_copy(update={"server": self.server}).model_dump()))

    def _is_forwarded(self, headers: HeaderMap) -> bool:
        """Whether a peer sent this, to be run here. Raises HttpError if somebody else says so."""
        if _FORWARDED not in headers:
            return False
        shown = headers.get(_PEER_KEY)
        if self._peer_key is None or shown is None or not hmac.compare_digest(shown, self._peer_key):
            message = f"the header {FORWARDED_HEADER!r} is for the replicas of this server; leave it out"
            raise HttpError(403, "forbidden", message, FORWARDED_HEADER)
        return True

    def _queue_lengths(self) -> dict[str, float]:
        return {tool.name: self.admission.waiting(tool.name) for tool in self.toolset.tools}

    def _own_headers(self) -> Headers:
        return self._names if self.server else self._names[1:]

    def _account(self, scope: Scope, route: str, reply: Reply, seconds: float, bytes_in: int) -> None:
        self._metrics.answered(route, reply.status, seconds, bytes_in, len(reply.body))
        if access_log.isEnabledFor(logging.DEBUG):
            access_log.debug(
                "method=%s route=%s status=%d seconds=%.6f bytes_in=%d bytes_out=%d",
                scope["method"], route, reply.status, seconds, bytes_in, len(reply.body),
            )  # fmt: skip


def _status_of(results: Sequence[StepResult]) -> tuple[int, dict[str, str | None] | None]:
    """Status, and the error of the whole, if there is one.

    200, unless not one entry could be served: 400 if all were wrong, 503 if there was room for none.
    """
    kinds = {result.fault.kind if result.fault else None for result in results}
    if kinds == {FaultKind.BAD_REQUEST}:
        return 400, _error_of(results[0])
    if kinds and kinds <= {FaultKind.OVERLOADED, FaultKind.SHUTTING_DOWN}:
        return 503, _error_of(results[0])
    return 200, None


def _error_of(result: StepResult) -> dict[str, str | None]:
    if result.fault is None:
        raise ValueError("a result without a fault is no error")
    field = _FIELD_OF_FAULT.match(result.fault.message)
    kind = result.fault.kind.value
    return {"message": result.fault.message, "type": kind, "field": field.group() if field else None}
