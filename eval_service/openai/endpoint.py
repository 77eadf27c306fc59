"""The service as an ASGI application. Ray Serve and uvicorn run it alike.

Routes: POST /v1/chat/completions, /v1/completions, GET /v1/models, /v1/models/<name>, /health, /metrics. Plain ASGI, as
the tool server: a framework would cost more per token of a stream than the rest of the work.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from eval_service.engines.base import EngineError, RefusedError
from eval_service.episode_adapter import StreamObserver
from eval_service.metrics import ServiceMetrics
from eval_service.openai.chat import ChatStream, chat_choice
from eval_service.openai.completion import CompletionStream, completion_choice
from eval_service.openai.errors import RETRY_LATER, ApiError, bad_request, from_fault, from_http, overloaded
from eval_service.openai.logprob_collector import LogprobCollector
from eval_service.openai.plan import Plan, beside_the_loop, chat_plan, completion_plan
from eval_service.openai.requests import ChatRequest, CompletionRequest, read_request
from eval_service.openai.response_builder import ResponseBuilder
from eval_service.openai.streaming import sse
from eval_service.openai.streaming.stream_buffer import StreamBuffer
from eval_service.openai.streaming.stream_reply import Sent, StreamReply
from eval_service.openai.usage import Usage, usage_of
from eval_service.service import Service
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.json_text import encode_json
from verl_tool.servers.api.disconnect import until_disconnect
from verl_tool.servers.api.host_check import HostCheck
from verl_tool.servers.api.http import (
    PROMETHEUS_TEXT,
    Disconnected,
    HeaderMap,
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
from verl_tool.servers.api.request_body import MAX_BODY_BYTES, RequestBodies
from verl_tool.servers.api.wire import decoded
from verl_tool.servers.execution.deadline import Deadline

log = logging.getLogger(__name__)

MODELS_PATH = "/v1/models"
HEALTH_SECONDS = 5.0
"""Deadline of asking engine and tool server whether they are well."""
HEARTBEAT_SECONDS = 15.0


class Streamer(StreamObserver, Protocol):
    """An observer that sends a choice while it grows."""

    async def finished(self, trajectory: Trajectory, with_trajectory: bool, usage: Usage | None) -> None: ...


@dataclass(frozen=True)
class Job:
    """A request that was understood, and the form in which it is answered."""

    plan: Plan
    builder: ResponseBuilder
    stream: bool
    choice: Callable[..., dict[str, Any]]
    """`chat_choice` or `completion_choice`."""
    streamer: Callable[[ResponseBuilder, int, str, Service, Sequence[str], StreamBuffer], Streamer]


class Endpoint:
    """All routes over one `Service`, which the caller makes and closes.

    `model`: the name by which clients ask for it. `fingerprint`: is told with it, see `eval_service.model.fingerprint`.
    `server`: the name of this service from its start to its end, which ``/health`` tells.
    `api_key`: every route but ``/health`` asks for it as a bearer token. `request_timeout_seconds`: after it a request
    is stopped and answered with 504. `heartbeat_seconds`: after so long without a word a stream sends a comment.
    `host_check`: by which names clients may call; None: by any.
    """

    def __init__(
        self,
        service: Service,
        model: str,
        *,
        fingerprint: str | None = None,
        server: str = "",
        api_key: str | None = None,
        request_timeout_seconds: float = 3600.0,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        max_body_bytes: int = MAX_BODY_BYTES,
        metrics: ServiceMetrics | None = None,
        host_check: HostCheck | None = None,
        bodies: RequestBodies | None = None,
    ) -> None:
        if not request_timeout_seconds > 0:
            raise ConfigError(f"request_timeout_seconds is {request_timeout_seconds}; it must be above 0")
        self.service = service
        self.model = model
        self._fingerprint = fingerprint
        self._server = server
        self.metrics = metrics or ServiceMetrics()
        self._token = None if api_key is None else f"Bearer {api_key}".encode()
        self._timeout = request_timeout_seconds
        self._heartbeat = heartbeat_seconds
        self.bodies = bodies or RequestBodies(max_body_bytes)
        self._host_check = host_check
        self._created = int(time.time())
        self._posts: dict[str, Callable[[bytes], Awaitable[Job]]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
        }
        self._gets: dict[str, Callable[[], Awaitable[Reply]]] = {
            MODELS_PATH: self._models,
            "/health": self._health,
            "/metrics": self._metrics_text,
        }
        admission = service.admission
        self.metrics.add_gauge("verl_tool_eval_running", "Answers being worked on.", lambda: admission.running)
        self.metrics.add_gauge("verl_tool_eval_queued", "Answers that wait for a place.", lambda: admission.queued)

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
        try:
            sent = await self._answer(scope, path, receive, send)
        except Disconnected:
            self.metrics.client_left()
            return
        except ApiError as error:
            sent = Sent(error.status, len(error.reply().body))
            await send_reply(send, error.reply())
        route = path if path in self._posts or path in self._gets else "other"
        self.metrics.http.answered(route, sent.status, time.perf_counter() - began, sent.bytes_in, sent.bytes_out)

    async def _answer(self, scope: Scope, path: str, receive: Receive, send: Send) -> Sent:
        """Raises ApiError as long as nothing has been sent."""
        headers = self._checked_headers(scope)
        self._authorise(headers, path)
        get = self._get_of(path)
        if get is not None:
            _refuse_other_method(scope, path, "GET")
            reply = await get()
            await send_reply(send, reply)
            return Sent(reply.status, len(reply.body))
        post = self._posts.get(path)
        if post is None:
            known = ", ".join([*(f"POST {p}" for p in self._posts), *(f"GET {p}" for p in self._gets)])
            raise ApiError(404, f"there is no {path[:80]!r} here; known: {known}", code="unknown_path")
        _refuse_other_method(scope, path, "POST")
        try:
            body = await self.bodies.read(scope, headers, receive)
        except HttpError as error:
            raise from_http(error) from None
        try:
            sent = await until_disconnect(self._work(body, post, send), receive)
        finally:
            self.bodies.release(len(body))
        return Sent(sent.status, sent.bytes_out, len(body))

    def _checked_headers(self, scope: Scope) -> HeaderMap:
        try:
            headers = headers_of(scope)
            if self._host_check is not None:
                self._host_check.refuse_stranger(scope, headers)
        except HttpError as error:
            raise from_http(error) from None
        return headers

    def _authorise(self, headers: HeaderMap, path: str) -> None:
        if self._token is None or path == "/health":
            return
        given = headers.get(b"authorization", b"")
        if not hmac.compare_digest(given, self._token):
            message = "the api key is missing or wrong; send the header 'Authorization: Bearer <api_key>'"
            raise ApiError(401, message, code="invalid_api_key", headers=((b"www-authenticate", b"Bearer"),))

    def _get_of(self, path: str) -> Callable[[], Awaitable[Reply]] | None:
        if path.startswith(f"{MODELS_PATH}/"):
            self._refuse_other_model(path.removeprefix(f"{MODELS_PATH}/"))
            return self._one_model
        return self._gets.get(path)

    async def _work(self, body: bytes, read: Callable[[bytes], Awaitable[Job]], send: Send) -> Sent:
        """Answer one request for generation, within its deadline."""
        stream: StreamReply | None = None
        try:
            with Deadline(self._timeout):
                job = await read(body)
                entries = len(job.plan.jobs)
                self._admit(entries)
                try:
                    if not job.stream:
                        return await self._at_once(job, send)
                    stream = StreamReply(send, self.metrics)
                    return await self._streamed(job, stream)
                finally:
                    self.service.admission.release(entries)
        except Exception as raised:
            error = self._as_api_error(raised)
            if stream is None or not stream.begun:
                raise error from raised
            await stream.fail(error)
            return Sent(error.status, stream.bytes_out)

    def _as_api_error(self, raised: Exception) -> ApiError:
        """Everything that can go wrong with a request, in OpenAI's shape."""
        if isinstance(raised, ApiError):
            return raised
        if isinstance(raised, RefusedError):
            return bad_request(str(raised), code="refused_by_engine")
        if isinstance(raised, EngineError):
            return overloaded(str(raised), code="engine_failed")
        if isinstance(raised, ToolFault):
            return from_fault(raised.as_fault())
        if isinstance(raised, ConfigError):
            return ApiError(500, str(raised), code="misconfigured")
        if isinstance(raised, asyncio.TimeoutError):
            return ApiError(504, f"no answer within {self._timeout:g} s; it was stopped", code="timeout")
        # The last line of defence: a bug of ours must not leave a client without an answer.
        log.error("a request failed", exc_info=raised)
        return ApiError(500, "the service failed; its log holds the traceback", code="internal")

    def _admit(self, entries: int) -> None:
        admission = self.service.admission
        if entries > admission.limit:
            message = f"{entries} answers are asked for; this service takes at most {admission.limit} at a time"
            raise ApiError(413, message, code="too_many_answers", param="n")
        if not admission.admit(entries):
            raise overloaded(
                f"the queue is full ({admission.inside} of {admission.limit} answers); send it again later"
            )

    async def _chat(self, body: bytes) -> Job:
        request = await decoded(partial(read_request, model=ChatRequest), body)
        self._refuse_other_model(request.model)
        builder = ResponseBuilder.of_chat(self.model)
        plan = await chat_plan(request, self.service, builder)
        return Job(plan, builder, bool(request.stream), chat_choice, ChatStream)

    async def _completion(self, body: bytes) -> Job:
        request = await decoded(partial(read_request, model=CompletionRequest), body)
        self._refuse_other_model(request.model)
        builder = ResponseBuilder.of_completion(self.model)
        plan = await completion_plan(request, self.service, builder)
        return Job(plan, builder, bool(request.stream), completion_choice, CompletionStream)

    async def _at_once(self, job: Job, send: Send) -> Sent:
        plan = job.plan
        collectors = [LogprobCollector() if plan.log_probs else None for _ in plan.jobs]
        runs = [
            self.service.run(generation, collector) for generation, collector in zip(plan.jobs, collectors, strict=True)
        ]
        trajectories = await all_or_none([asyncio.ensure_future(run) for run in runs])
        usage = usage_of(trajectories, plan.n)
        self.metrics.answered(trajectories, usage)

        def answer() -> bytes:
            choices = [
                job.choice(i, trajectory, self.service, plan.stops, collector and collector.turns, plan.with_trajectory)
                for i, (trajectory, collector) in enumerate(zip(trajectories, collectors, strict=True))
            ]
            return encode_json(job.builder.whole(choices, usage))

        tokens = sum(len(trajectory.prompt_ids) + len(trajectory.response_ids) for trajectory in trajectories)
        reply = Reply(await beside_the_loop(answer, tokens))
        await send_reply(send, reply)
        return Sent(reply.status, len(reply.body))

    async def _streamed(self, job: Job, stream: StreamReply) -> Sent:
        buffer = StreamBuffer()
        running = asyncio.ensure_future(self._run_into(job, buffer))
        running.add_done_callback(lambda _: buffer.close())
        beating = asyncio.ensure_future(buffer.keep_putting(sse.HEARTBEAT, self._heartbeat))
        try:
            while part := await buffer.take():
                await stream.write(part)
            usage = await running
        finally:
            running.cancel()
            beating.cancel()
            await asyncio.gather(running, beating, return_exceptions=True)
        if job.plan.include_usage:
            await stream.write(job.builder.chunk([], usage))
        await stream.end()
        return Sent(200, stream.bytes_out)

    async def _run_into(self, job: Job, buffer: StreamBuffer) -> Usage:
        """Run all choices, each of which writes itself into `buffer`. The one that ends last bears the usage."""
        plan = job.plan
        done: list[Trajectory | None] = [None] * len(plan.jobs)

        async def one(i: int) -> Trajectory:
            generation = plan.jobs[i]
            observer = job.streamer(job.builder, i, generation.trajectory_id, self.service, plan.stops, buffer)
            done[i] = trajectory = await self.service.run(generation, observer)
            finished = [t for t in done if t is not None]
            last = len(finished) == len(done)
            await observer.finished(trajectory, plan.with_trajectory, usage_of(finished, plan.n) if last else None)
            return trajectory

        trajectories = await all_or_none([asyncio.ensure_future(one(i)) for i in range(len(plan.jobs))])
        usage = usage_of(trajectories, plan.n)
        self.metrics.answered(trajectories, usage)
        return usage

    def _refuse_other_model(self, name: str) -> None:
        if name != self.model:
            message = f"the model {name[:80]!r} is not served here; known: {self.model}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _models(self) -> Reply:
        return Reply(encode_json({"object": "list", "data": [self._card()]}))

    async def _one_model(self) -> Reply:
        return Reply(encode_json(self._card()))

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "verl-tool",
            "max_model_len": self.service.engine.max_model_len,
            "fingerprint": self._fingerprint,
        }

    async def _health(self) -> Reply:
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
            return Reply(encode_json(report))
        return Reply(encode_json(report), 503, headers=RETRY_LATER)

    async def _metrics_text(self) -> Reply:
        return Reply(self.metrics.exposition(), content_type=PROMETHEUS_TEXT)


async def all_or_none(tasks: Sequence[asyncio.Future[Trajectory]]) -> list[Trajectory]:
    """All results; if one raises, or the caller is cancelled, the others are cancelled and waited for."""
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _refuse_other_method(scope: Scope, path: str, method: str) -> None:
    if scope["method"] != method:
        message = f"{path[:80]} takes {method}, not {scope['method'][:20]!r}"
        raise ApiError(405, message, code="wrong_method", headers=((b"allow", method.encode()),))
