"""The retrieval server as an ASGI application. Ray Serve and uvicorn run it alike.

Routes: POST /retrieve, GET /health, /metrics. The bodies of ``/retrieve`` are those of Search-R1's server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.responses import Response

from verl_tool.http.host_check import HostCheck
from verl_tool.http.messages import RETRY_AFTER, HttpError, JsonResponse
from verl_tool.http.metrics import PROMETHEUS_TEXT, HttpMetrics
from verl_tool.http.request_body import MAX_BODY_BYTES, RequestBodies
from verl_tool.http.web_app import HEALTH_PATH, Request, WebApp
from verl_tool.protocol import HealthReport
from verl_tool.retrieval.index import MAX_TOPK, Index
from verl_tool.retrieval.passage import RetrievalError
from verl_tool.retrieval.search_batcher import SearchBatcher, SearchResult
from verl_tool.retrieval.serving.settings import RetrievalSettings
from verl_tool.servers.replica.wire import decode_model, decoded
from verl_tool.util.deadline import Deadline

MAX_QUERIES = 1024
"""Of one request."""
MAX_QUERY_CHARACTERS = 10_000
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RetrieveRequest(BaseModel):
    """Body of ``POST /retrieve``."""

    model_config = ConfigDict(extra="forbid")

    queries: list[Annotated[str, StringConstraints(max_length=MAX_QUERY_CHARACTERS)]] = Field(max_length=MAX_QUERIES)
    topk: int | None = Field(default=None, ge=1, le=MAX_TOPK)
    """None: the server's default."""
    return_scores: bool = False


class RetrievalHealth(HealthReport):
    """Answer of ``GET /health``. `running` and `queued` are queries."""

    kind: str = ""
    passages: int = 0


class Reports(Protocol):
    """Adds to a replica's own reports those of the others (`ClusterReports`)."""

    async def health(self, own: HealthReport) -> HealthReport: ...

    async def metrics(self, own: bytes) -> bytes: ...


class RetrievalApp(WebApp):
    """All routes over one index. `replica`: id of this replica. `reports`: of all replicas; None: there is this one."""

    def __init__(
        self, index: Index, settings: RetrievalSettings, *, replica: str = "local", reports: Reports | None = None
    ) -> None:
        self._settings = settings
        self._replica = replica
        self._reports = reports
        self._inside = 0
        """Queries of requests that are not answered yet."""
        self._registry = CollectorRegistry()
        self._batch_sizes = Histogram(
            "verl_tool_retrieval_batch_queries", "Queries searched together.", buckets=_BATCH_SIZES,
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "verl_tool_retrieval_search_seconds", "Time to search a batch.", buckets=_SECONDS, registry=self._registry
        )
        self._queries = Counter("verl_tool_retrieval_queries", "Queries searched.", registry=self._registry)
        inside = Gauge("verl_tool_retrieval_inside", "Queries being searched or waiting.", registry=self._registry)
        inside.set_function(lambda: self._inside)
        self.searcher = SearchBatcher(index, max_batch=settings.max_batch, on_batch=self._count)
        super().__init__(
            [("POST", "/retrieve", self._retrieve), ("GET", HEALTH_PATH, self._health), ("GET", "/metrics", self._all)],
            HttpMetrics(self._registry),
            RequestBodies(MAX_BODY_BYTES),
            tokens=() if settings.api_key is None else (settings.api_key,),
            host_check=HostCheck(
                settings.listen_host, settings.listen_port, settings.allowed_hosts, has_key=settings.api_key is not None
            ),
        )

    def own_reports(self) -> WebApp:
        """An application that answers for this replica only, for the others to ask."""
        routes = [("GET", HEALTH_PATH, self._own_health), ("GET", "/metrics", self._own_metrics)]
        return WebApp(routes, HttpMetrics(CollectorRegistry()), RequestBodies(MAX_BODY_BYTES))

    def as_http_error(self, error: Exception) -> HttpError:
        if isinstance(error, RetrievalError):
            return HttpError(500, "search_failed", str(error))
        if isinstance(error, asyncio.TimeoutError):
            seconds = self._settings.request_timeout_seconds
            return HttpError(504, "timeout", f"no answer within {seconds:g} s; ask for less, or add replicas")
        return super().as_http_error(error)

    async def _retrieve(self, request: Request) -> Response:
        retrieve = await decoded(partial(decode_model, model=RetrieveRequest), request.body)
        self._admit(len(retrieve.queries))
        try:
            with Deadline(self._settings.request_timeout_seconds):
                found = await self.searcher.search(retrieve.queries, retrieve.topk or self._settings.topk)
        finally:
            self._inside -= len(retrieve.queries)
        return JsonResponse(answer(found, retrieve.return_scores))

    def _admit(self, queries: int) -> None:
        limit = self._settings.max_queued_queries
        if self._inside + queries > limit:
            message = f"the queue is full ({self._inside} of {limit} queries); send it again later"
            raise HttpError(503, "overloaded", message, headers=RETRY_AFTER)
        self._inside += queries

    def _count(self, queries: int, seconds: float) -> None:
        self._queries.inc(queries)
        self._batch_sizes.observe(queries)
        self._seconds.observe(seconds)

    def _report(self) -> RetrievalHealth:
        index, waiting = self.searcher.index, self.searcher.queued
        report = RetrievalHealth(
            status="healthy",
            server=self._settings.server,
            replica=self._replica,
            running=self._inside - waiting,
            queued=waiting,
            kind=index.manifest.settings.kind.value,
            passages=len(index),
        )
        try:
            index.check()
        except RetrievalError as error:
            return report.model_copy(update={"status": "unhealthy", "message": str(error)})
        return report

    async def _health(self, request: Request) -> Response:
        own: HealthReport = self._report()
        return _health_response(own if self._reports is None else await self._reports.health(own))

    async def _own_health(self, request: Request) -> Response:
        return _health_response(self._report())

    async def _all(self, request: Request) -> Response:
        own = generate_latest(self._registry)
        text = own if self._reports is None else await self._reports.metrics(own)
        return Response(text, media_type=PROMETHEUS_TEXT)

    async def _own_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=PROMETHEUS_TEXT)


def answer(found: Sequence[Sequence[SearchResult]], with_scores: bool) -> bytes:
    """Search-R1's answer: ``{"result": [[{"document": {"id", "contents"}, "score"}]]}``, or documents alone."""
    if with_scores:
        of_queries = [
            [b'{"document":%b,"score":%b}' % (hit.line, repr(hit.score).encode()) for hit in f] for f in found
        ]
    else:
        of_queries = [[hit.line for hit in hits] for hits in found]
    return b'{"result":[%b]}' % b",".join(b"[%b]" % b",".join(hits) for hits in of_queries)


def _health_response(report: HealthReport) -> Response:
    well = report.status == "healthy"
    return JsonResponse(report.model_dump(), 200 if well else 503, None if well else RETRY_AFTER)
