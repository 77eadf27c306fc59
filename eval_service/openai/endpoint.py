"""The service as an ASGI application. Ray Serve and uvicorn run it alike.

Routes: POST /v1/chat/completions, /v1/completions, GET /v1/models, /v1/models/<name>, /health, /metrics; and those of
`verl_tool.gateway` below /sessions, for agents that run their tools themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client.exposition import generate_latest
from starlette.responses import Response

from eval_service.engines.base import EngineError, RequestRejectedError
from eval_service.metrics import ServiceMetrics
from eval_service.openai.chat import ChatStream, chat_choice
from eval_service.openai.completion import CompletionStream, completion_choice
from eval_service.openai.errors import bad_request, from_fault, openai_error, overloaded
from eval_service.openai.log_probs import LogprobCollector
from eval_service.openai.plan import Plan, chat_plan, completion_plan, run_in_executor
from eval_service.openai.requests import ChatRequest, CompletionRequest, read_request
from eval_service.openai.response_builder import ResponseBuilder
from eval_service.openai.streaming.choice_stream import ChoiceStream
from eval_service.openai.streaming.stream_buffer import StreamBuffer
from eval_service.openai.usage import Usage, usage_of
from eval_service.service import GenerationJob, Service
from eval_service.session_engine import SessionEngine
from verl_tool.agent_loop.rollout import all_or_none
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.gateway.gateway_app import SESSIONS_PATH, Gateway, GatewayOptions
from verl_tool.gateway.session import SessionModel
from verl_tool.http.event_stream import HEARTBEAT, EventStream
from verl_tool.http.host_check import HostCheck
from verl_tool.http.messages import RETRY_AFTER, HttpError, JsonResponse
from verl_tool.http.metrics import PROMETHEUS_TEXT
from verl_tool.http.request_body import MAX_MEDIA_BODY_BYTES, RequestBodies
from verl_tool.http.web_app import HEALTH_PATH, Request, WebApp
from verl_tool.servers.replica.wire import decoded
from verl_tool.util.deadline import Deadline
from verl_tool.util.json_text import encode_json

MODELS_PATH = "/v1/models"
HEALTH_SECONDS = 5.0
"""Deadline of asking engine and tool server whether they are well."""
HEARTBEAT_SECONDS = 15.0


@dataclass(frozen=True)
class Job:
    """A request that was understood, and the form in which it is answered."""

    plan: Plan
    builder: ResponseBuilder
    stream: bool
    choice: Callable[..., dict[str, Any]]
    """`chat_choice` or `completion_choice`."""
    streamer: Callable[[ResponseBuilder, int, GenerationJob, Service, Sequence[str], StreamBuffer], ChoiceStream]


class Endpoint(WebApp):
    """All routes over one `Service`, which the caller makes and closes.

    `model`: the name by which clients ask for it. `fingerprint` and `checkpoint`
        (which weights of a run it is) are told with it, see `eval_service.model.fingerprint`.
    `server`: the name of this service from its start to its end, which ``/health`` tells.
    `own_port`: a port of this process alone, if several share the service's; agents' sessions are reached there.
    `api_key`: every route but ``/health`` asks for it as a bearer token. `request_timeout_seconds`: after it a
    request is stopped and answered with 504. `heartbeat_seconds`: after so long without a word a stream gets a comment.
    `host_check`: by which names clients may call; None: by any.
    """

    unauthorized = "invalid_api_key"

    def __init__(
        self,
        service: Service,
        model: str,
        *,
        fingerprint: str | None = None,
        checkpoint: str | None = None,
        server: str = "",
        api_key: str | None = None,
        own_port: int | None = None,
        request_timeout_seconds: float = 3600.0,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        max_body_bytes: int = MAX_MEDIA_BODY_BYTES,
        metrics: ServiceMetrics | None = None,
        host_check: HostCheck | None = None,
        bodies: RequestBodies | None = None,
    ) -> None:
        if not request_timeout_seconds > 0:
            raise ConfigError(f"request_timeout_seconds is {request_timeout_seconds}; it must be above 0")
        self.service = service
        self.model = model
        self._fingerprint = fingerprint
        self._checkpoint = checkpoint
        self._server = server
        self.metrics = metrics or ServiceMetrics()
        self._timeout = request_timeout_seconds
        self._heartbeat = heartbeat_seconds
        self._created = int(time.time())
        sampler = SessionEngine(service, self.metrics, self._admit, request_timeout_seconds)
        self.gateway = Gateway(
            SessionModel.create(
                *(sampler, service.tokenizer, service.session_formats, service.engine.max_model_len),
                end_token_ids=service.end_token_ids,
                place=sampler.place,
            ),
            GatewayOptions(
                model_name=model, sampling=service.sampling.model_dump(), admin_key=api_key, own_port=own_port
            ),
        )
        super().__init__(
            [
                ("POST", "/v1/chat/completions", partial(self._generate, self._chat)),
                ("POST", "/v1/completions", partial(self._generate, self._completion)),
                ("GET", MODELS_PATH, self._models),
                ("GET", MODELS_PATH + "/{model:path}", self._one_model),
                ("GET", HEALTH_PATH, self._health),
                ("GET", "/metrics", self._metrics_text),
                *self.gateway.routes(),
            ],
            self.metrics.http,
            bodies or RequestBodies(max_body_bytes),
            tokens=() if api_key is None else (api_key,),
            keyed_below=SESSIONS_PATH,
            host_check=host_check,
        )
        admission = service.admission
        self.metrics.add_gauge("verl_tool_eval_running", "Answers being worked on.", lambda: admission.running)
        self.metrics.add_gauge("verl_tool_eval_queued", "Answers that wait for a place.", lambda: admission.queued)

    def error_response(self, error: HttpError) -> Response:
        return JsonResponse(openai_error(error), error.status, error.headers)

    def client_left(self) -> None:
        self.metrics.cancelled.inc()

    def as_http_error(self, error: Exception) -> HttpError:
        if isinstance(error, RequestRejectedError):
            return bad_request(str(error), code="refused_by_engine")
        if isinstance(error, EngineError):
            return overloaded(str(error), code="engine_failed")
        if isinstance(error, ToolFault):
            return from_fault(error.as_fault())
        if isinstance(error, ConfigError):
            return HttpError(500, "misconfigured", str(error))
        if isinstance(error, asyncio.TimeoutError):
            return HttpError(504, "timeout", f"no answer within {self._timeout:g} s; it was stopped")
        return super().as_http_error(error)

    async def _generate(self, read: Callable[[bytes], Awaitable[Job]], request: Request) -> Response:
        """Answer one request for generation, within its deadline."""
        until = time.monotonic() + self._timeout
        with Deadline(self._timeout):
            job = await read(request.body)
            self._admit(len(job.plan.jobs))
            if not job.stream:
                return await self._at_once(job)
            events = self._events(job, until)
            return EventStream(await anext(events), events, self._describe)

    def _describe(self, raised: Exception) -> tuple[int, object]:
        """What a stream says of that for which it ends."""
        error = self.as_http_error(raised)
        return error.status, openai_error(error)

    def _admit(self, entries: int) -> None:
        admission = self.service.admission
        if entries > admission.limit:
            message = f"{entries} answers are asked for; this service takes at most {admission.limit} at a time"
            raise HttpError(413, "too_many_answers", message, "n")
        if not admission.admit(entries):
            raise overloaded(
                f"the queue is full ({admission.inside} of {admission.limit} answers); send it again later"
            )

    async def _chat(self, body: bytes) -> Job:
        request = await decoded(partial(read_request, model=ChatRequest), body)
        self._reject_other_model(request.model)
        builder = ResponseBuilder.of_chat(self.model)
        plan = await chat_plan(request, self.service, builder)
        return Job(plan, builder, bool(request.stream), chat_choice, ChatStream)

    async def _completion(self, body: bytes) -> Job:
        request = await decoded(partial(read_request, model=CompletionRequest), body)
        self._reject_other_model(request.model)
        builder = ResponseBuilder.of_completion(self.model)
        plan = await completion_plan(request, self.service, builder)
        return Job(plan, builder, bool(request.stream), completion_choice, CompletionStream)

    async def _at_once(self, job: Job) -> Response:
        plan = job.plan
        collectors = [LogprobCollector() if plan.log_probs else None for _ in plan.jobs]
        runs = [
            self.service.run(generation, collector) for generation, collector in zip(plan.jobs, collectors, strict=True)
        ]
        try:
            trajectories = await all_or_none([asyncio.ensure_future(run) for run in runs])
        finally:
            self.service.admission.release(len(runs))
        usage = usage_of(trajectories, plan.n)
        self.metrics.answered(trajectories, usage)

        def answer() -> bytes:
            choices = [
                job.choice(i, trajectory, self.service, plan.stops, collector and collector.turns, plan.with_trajectory)
                for i, (trajectory, collector) in enumerate(zip(trajectories, collectors, strict=True))
            ]
            return encode_json(job.builder.whole(choices, usage))

        size = sum(len(trajectory.prompt_ids) + len(trajectory.response_ids) for trajectory in trajectories)
        size += sum(len(image.data) for t in trajectories if plan.with_trajectory for image in t.images.values())
        return JsonResponse(await run_in_executor(answer, size))

    async def _events(self, job: Job, until: float) -> AsyncGenerator[bytes, None]:
        """The answer as a stream, up to its end mark. Raises what its choices raise."""
        began = time.perf_counter()
        buffer = StreamBuffer()
        running = asyncio.ensure_future(self._run_into(job, buffer, until))
        running.add_done_callback(lambda _: buffer.close())
        beating = asyncio.ensure_future(buffer.keep_putting(HEARTBEAT, self._heartbeat))
        first = True
        try:
            while part := await buffer.take():
                if first and part != HEARTBEAT:
                    first = False
                    self.metrics.first_chunk_seconds.observe(time.perf_counter() - began)
                yield part
            usage = await running
            if job.plan.include_usage:
                yield job.builder.chunk([], usage)
        finally:
            running.cancel()
            beating.cancel()
            await asyncio.gather(running, beating, return_exceptions=True)
            self.service.admission.release(len(job.plan.jobs))

    async def _run_into(self, job: Job, buffer: StreamBuffer, until: float) -> Usage:
        """Run all choices, each of which writes itself into `buffer`. The one that ends last bears the usage. Raises
        asyncio.TimeoutError if they are not done at `until` (``time.monotonic()``)."""
        plan = job.plan
        done: list[Trajectory | None] = [None] * len(plan.jobs)

        async def one(i: int) -> Trajectory:
            generation = plan.jobs[i]
            observer = job.streamer(job.builder, i, generation, self.service, plan.stops, buffer)
            done[i] = trajectory = await self.service.run(generation, observer)
            finished = [t for t in done if t is not None]
            last = len(finished) == len(done)
            await observer.finished(trajectory, plan.with_trajectory, usage_of(finished, plan.n) if last else None)
            return trajectory

        with Deadline(until - time.monotonic()):
            trajectories = await all_or_none([asyncio.ensure_future(one(i)) for i in range(len(plan.jobs))])
        usage = usage_of(trajectories, plan.n)
        self.metrics.answered(trajectories, usage)
        return usage

    def _reject_other_model(self, name: str) -> None:
        if name != self.model:
            message = f"the model {name[:80]!r} is not served here; known: {self.model}"
            raise HttpError(404, "model_not_found", message, "model")

    async def _models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: Request) -> Response:
        self._reject_other_model(request.path_params["model"])
        return JsonResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "verl-tool",
            "max_model_len": self.service.engine.max_model_len,
            "fingerprint": self._fingerprint,
            "checkpoint": self._checkpoint,
        }

    async def _health(self, request: Request) -> Response:
        admission = self.service.admission
        report: dict[str, Any] = {
            "status": "healthy",
            "message": "",
            "server": self._server,
            "model": self.model,
            "running": admission.running,
            "queued": admission.queued,
        }
        try:
            with Deadline(HEALTH_SECONDS):
                await self.service.engine.check()
                await self.service.check_tools()
        except EngineError as error:
            report |= {"status": "unhealthy", "message": f"the engine: {error}"}
        except ToolFault as fault:
            report |= {"status": "unhealthy", "message": f"the tool server: {fault.message}"}
        except asyncio.TimeoutError:
            message = f"engine and tool server did not answer within {HEALTH_SECONDS:g} s"
            report |= {"status": "unhealthy", "message": message}
        if report["status"] == "healthy":
            return JsonResponse(report)
        return JsonResponse(report, 503, RETRY_AFTER)

    async def _metrics_text(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=PROMETHEUS_TEXT)
