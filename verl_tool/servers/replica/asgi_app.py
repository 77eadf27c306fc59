"""Serve the tools of one replica as an ASGI application.

Routes: POST /get_observation, /fork, /run_code; GET /health, /-/healthz, /tools, /metrics, /replicas; and those that
the caller adds.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from starlette.responses import Response

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.http.host_check import HostCheck
from verl_tool.http.messages import RETRY_AFTER, HttpError, JsonResponse
from verl_tool.http.metrics import PROMETHEUS_TEXT, HttpMetrics
from verl_tool.http.request_body import MAX_BODY_BYTES, RequestBodies
from verl_tool.http.web_app import HEALTH_PATH, PROBE_PATH, Request, WebApp
from verl_tool.protocol import (
    BEGUN_HEADER,
    REPLICA_HEADER,
    RESENT,
    SERVER_HEADER,
    Fault,
    FaultKind,
    ForkRequest,
    ForkResponse,
    HealthReport,
    StepRequest,
    StepResult,
    proof_of,
)
from verl_tool.sandbox_fusion import RunCodeRequest
from verl_tool.servers.execution.admission import Admission
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.replica.router import FORWARDED_HEADER, PEER_KEY_HEADER, Router
from verl_tool.servers.replica.run_code import run_code
from verl_tool.servers.replica.wire import decode_model, decode_request, decoded, encode_response, encoded, size_of
from verl_tool.util.json_text import encode_json

if TYPE_CHECKING:
    from verl_tool.sandbox import SandboxPool

HOLD_SECONDS = 5.0
"""After which entries that wait in a queue of this machine are answered, so that their callers know it."""
_FIELD_OF_FAULT = re.compile(r"(?:[a-z_]+\[\d+\]|tool_name)(?= )")

_STATUSES = {
    FaultKind.BAD_REQUEST: 400,
    FaultKind.STATE_LOST: 404,
    FaultKind.NOT_FORKABLE: 409,
    FaultKind.TIMEOUT: 504,
}
_FORWARDED, _PEER_KEY = FORWARDED_HEADER.encode(), PEER_KEY_HEADER.encode()
_STARTED = BEGUN_HEADER.encode()

AppHandler: TypeAlias = "Callable[[ToolServerApp, Request], Awaitable[Response]]"
"""Answers a route that the caller adds."""


class ToolServerApp(WebApp):
    """All routes over one `ToolSet`, which the caller starts and closes.

    - `max_concurrent_requests`: number of entries (trajectories, not HTTP requests) that run at the same time.
    - `max_queued`: number of entries that may wait. Further ones are answered with 503 and ``Retry-After``.
    - `request_timeout_seconds`: time after which an entry is answered with the fault ``timeout``.
    - `api_key`: bearer token that every route except ``/health`` requires.
    - `router`: forwards the entries that belong to other replicas.
    - `peer_key`: proves that a request comes from another replica. With None, no forwarded request is accepted.
    - `host_check`: host names under which clients may call, None for all.
    - `server`: name of the server. Requests that name another server are rejected.
    - `routes`: method, path and handler of further routes.
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
        routes: Sequence[tuple[str, str, AppHandler]] = (),
    ) -> None:
        if not request_timeout_seconds > 0:
            raise ConfigError(f"request_timeout_seconds is {request_timeout_seconds}; it must be above 0")
        self.toolset = toolset
        self.admission = Admission(max_concurrent_requests, max_queued)
        self.router = router or Router()
        self.server = server
        self._peer_key = None if peer_key is None else peer_key.encode()
        self.request_timeout_seconds = request_timeout_seconds
        super().__init__(
            [
                ("POST", "/get_observation", self._get_observation),
                ("POST", "/fork", self._fork),
                ("POST", "/run_code", self._run_code),
                ("GET", HEALTH_PATH, self._health),
                ("GET", PROBE_PATH, self._probe),
                ("GET", "/tools", self._tools),
                ("GET", "/metrics", self._metrics_text),
                ("GET", "/replicas", self._replicas),
                *((method, path, partial(handler, self)) for method, path, handler in routes),
            ],
            HttpMetrics(toolset.metrics.registry),
            bodies or RequestBodies(max_body_bytes),
            names={SERVER_HEADER: server, REPLICA_HEADER: self.router.replica_id},
            tokens=() if api_key is None else (api_key, proof_of(api_key, server)),
            host_check=host_check,
        )
        toolset.metrics.add_gauge("verl_tool_queue_length", "Actions that wait for a slot.", self._queue_lengths)

    async def run_local(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        """Run entries in this process, within the deadline."""
        return await self.toolset.step(
            requests,
            timeout_seconds=self.request_timeout_seconds,
            hold_seconds=HOLD_SECONDS,
            admission=self.admission,
        )

    async def fork_local(self, request: ForkRequest) -> ForkResponse:
        """Fork a trajectory of this process, within the deadline."""
        result = await self.toolset.fork(
            request.trajectory_id,
            request.new_trajectory_id,
            timeout_seconds=self.request_timeout_seconds,
            admission=self.admission,
        )
        return ForkResponse(trajectory_id=result.trajectory_id, replica=self.router.replica_id, fault=result.fault)

    async def _get_observation(self, request: Request) -> Response:
        began = time.perf_counter()
        forwarded = self.is_forwarded(request)
        entries = await decoded(partial(decode_request, max_entries=self.admission.limit), request.body)
        if (begun := request.headers.get(_STARTED)) is not None:
            resent = begun == RESENT.encode()
            entries = [
                replace(each, resent=resent, begun=not resent) if isinstance(each, StepRequest) else each
                for each in entries
            ]
        results = await self.answer(entries, forwarded)
        milliseconds = (time.perf_counter() - began) * 1e3
        status, error = (200, None) if forwarded else _status_of(results)
        known = [entry.known_media if isinstance(entry, StepRequest) else () for entry in entries]
        body = await encoded(partial(encode_response, results, milliseconds, error, known), size_of(results))
        return JsonResponse(body, status, RETRY_AFTER if status == 503 else None)

    async def answer(self, entries: Sequence[StepRequest | Fault], forwarded: bool = False) -> list[StepResult]:
        """Return the results of all entries in their order. Each runs on its owner, or here if it was `forwarded`.

        Raises HttpError 503 if the queue is full.
        """
        self._admit(len(entries))
        try:
            return await self._step(entries, forwarded)
        finally:
            self.admission.release(len(entries))

    def _admit(self, entries: int) -> None:
        if not self.admission.admit(entries):
            limit = self.admission.limit
            message = f"the queue is full ({self.admission.inside} of {limit} entries); send it again later"
            raise HttpError(503, FaultKind.OVERLOADED.value, message, headers=RETRY_AFTER)

    async def _step(self, entries: Sequence[StepRequest | Fault], forwarded: bool) -> list[StepResult]:
        """Return the results of all entries in their order. Malformed entries are answered without being run."""
        good = [entry for entry in entries if isinstance(entry, StepRequest)]
        results = await (self.run_local(good) if forwarded else self.router.step(good, self.run_local))
        if len(good) == len(entries):
            return results
        answered = iter(results)
        return [
            StepResult("", valid=False, fault=entry) if isinstance(entry, Fault) else next(answered)
            for entry in entries
        ]

    async def _fork(self, request: Request) -> Response:
        forwarded = self.is_forwarded(request)
        requested = await decoded(partial(decode_model, model=ForkRequest), request.body)
        self._admit(1)
        try:
            answer = await (self.fork_local(requested) if forwarded else self.router.fork(requested, self.fork_local))
        finally:
            self.admission.release(1)
        if answer.fault is None:
            return JsonResponse(answer.model_dump(mode="json"))
        status = _status_of_fault(answer.fault)
        description = {"error": _error_of(answer.fault), **answer.model_dump(mode="json")}
        return JsonResponse(description, status, RETRY_AFTER if status == 503 else None)

    async def _run_code(self, request: Request) -> Response:
        pool, limit = self._sandbox(), self.request_timeout_seconds
        requested = await decoded(partial(decode_model, model=RunCodeRequest), request.body)
        self._admit(1)
        try:
            async with self.admission.place("run_code"):
                answer = await asyncio.wait_for(run_code(pool, requested, limit), limit)
        except asyncio.TimeoutError:
            message = f"no answer within {limit:g} s"
            raise HttpError(504, FaultKind.TIMEOUT.value, message) from None
        finally:
            self.admission.release(1)
        size = sum(len(content) for content in answer.files.values())
        return JsonResponse(await encoded(lambda: encode_json(answer.model_dump()), size))

    def _sandbox(self) -> SandboxPool:
        for tool in self.toolset.tools:
            if tool.sandbox is not None:
                return tool.sandbox
        names = ", ".join(tool.name for tool in self.toolset.tools)
        message = f"no tool here runs code (tools: {names}); start the server with --tool_type python_code"
        raise HttpError(404, "no_sandbox", message)

    async def _health(self, request: Request) -> Response:
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
        if not self.is_forwarded(request):
            report = await self.router.health(report)
        well = report.status == "healthy"
        return JsonResponse(report.model_dump(), 200 if well else 503, None if well else RETRY_AFTER)

    async def _probe(self, _request: Request) -> Response:
        try:
            await self.toolset.check()
        except VerlToolError as error:
            raise HttpError(503, "unhealthy", str(error), headers=RETRY_AFTER) from error
        return Response("success", media_type="text/plain")

    async def _tools(self, request: Request) -> Response:
        return JsonResponse({"tools": [tool.model_dump() for tool in self.toolset.describe()]})

    async def _metrics_text(self, request: Request) -> Response:
        text = self.toolset.metrics.exposition()
        if not self.is_forwarded(request):
            text = await self.router.metrics(text)
        return Response(text, media_type=PROMETHEUS_TEXT)

    async def _replicas(self, request: Request) -> Response:
        replicas = await self.router.replicas()
        return JsonResponse(replicas.model_copy(update={"server": self.server}).model_dump())

    def is_forwarded(self, request: Request) -> bool:
        """Return whether a peer forwarded this request. Raises HttpError 403 if the sender does not have the key."""
        if _FORWARDED not in request.headers:
            return False
        provided = request.headers.get(_PEER_KEY)
        if self._peer_key is None or provided is None or not hmac.compare_digest(provided, self._peer_key):
            message = f"the header {FORWARDED_HEADER!r} is for the replicas of this server; leave it out"
            raise HttpError(403, "forbidden", message, FORWARDED_HEADER)
        return True

    def _queue_lengths(self) -> dict[str, float]:
        return {tool.name: self.admission.waiting(tool.name) for tool in self.toolset.tools}


def _status_of(results: Sequence[StepResult]) -> tuple[int, dict[str, str | None] | None]:
    """Return the HTTP status and the error of the whole answer, None for success.

    The status is 400 if all entries were malformed, 503 if there were slots for none, and otherwise 200.
    """
    kinds = {result.fault.kind if result.fault else None for result in results}
    if kinds == {FaultKind.BAD_REQUEST}:
        return 400, _error_of(results[0].fault)
    if kinds and kinds <= {FaultKind.OVERLOADED, FaultKind.SHUTTING_DOWN}:
        return 503, _error_of(results[0].fault)
    return 200, None


def _status_of_fault(fault: Fault) -> int:
    """Return the HTTP status of an answer that consists of this fault."""
    return _STATUSES.get(fault.kind, 503 if fault.retryable else 500)


def _error_of(fault: Fault | None) -> dict[str, str | None]:
    if fault is None:
        raise ValueError("a result without a fault is not an error")
    field = _FIELD_OF_FAULT.match(fault.message)
    return {"message": fault.message, "type": fault.kind.value, "field": field.group() if field else None}
