"""Our tools and tasks in the Open Reward Standard (https://openrewardstandard.io), as openreward 0.1.167 speaks it.

``POST /create_session`` gives a session's id, ``POST /create`` begins a row in it, ``POST /call`` calls a tool and
streams its answer. What the policy writes without a call ends the episode: it is the terminal tool `submit.SUBMIT`. A
call whose connection breaks is not run again: its task's id gets the answer.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from verl_tool.environments.served.episode import (
    CallOutcome,
    CapacityError,
    EpisodeError,
    ServedEpisode,
    ServedEpisodes,
)
from verl_tool.environments.served.served_app import ServedApp, read_object
from verl_tool.environments.served.submit import ARGUMENT, DESCRIPTION, SUBMIT, call_or_submit
from verl_tool.environments.served.task_routes import ENVIRONMENT, TaskRoutes
from verl_tool.http.event_stream import HEARTBEAT, EventStream
from verl_tool.http.host_check import HostCheck
from verl_tool.http.messages import RETRY_AFTER, HttpError, JsonResponse
from verl_tool.http.web_app import Handler, Request
from verl_tool.util.json_text import encode_json

MAX_BODY_BYTES = 4 << 20
MAX_TASKS = 1024
"""Answers of calls that are kept for a client that asks again."""
_HEARTBEAT_SECONDS = 5.0
_REASONS = {"tool_not_found": "not_found", "invalid_args": "input_validation"}


class _Create(BaseModel):
    model_config = ConfigDict(extra="forbid")

    env_name: str | None = None
    task_spec: dict[str, Any] | None = None
    split: str | None = None
    index: int | None = None


class _Call(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    input: dict[str, Any] = {}
    task_id: str | None = None


class OrsApp(ServedApp):
    """The environment over HTTP."""

    healthy = "ok"

    def __init__(
        self,
        episodes: ServedEpisodes,
        *,
        name: str = "verl_tool",
        api_key: str | None = None,
        host_check: HostCheck | None = None,
    ) -> None:
        self._sessions: dict[str, ServedEpisode] = {}
        self._tasks: OrderedDict[str, tuple[str, asyncio.Task[bytes]]] = OrderedDict()
        """Sessions and answers of calls, by the ids of their tasks."""
        tasks = TaskRoutes(episodes, name)
        super().__init__(
            episodes,
            [
                ("POST", "/create_session", self._create_session),
                ("POST", "/create", self._create),
                ("POST", "/ping", self._ping),
                ("POST", "/delete", self._delete),
                ("POST", "/delete_session", self._delete),
                *self._routes(""),
                *tasks.routes(""),
                *self._routes(ENVIRONMENT),
                *tasks.routes()[1:],
            ],
            name=name,
            api_key=api_key,
            host_check=host_check,
            max_body_bytes=MAX_BODY_BYTES,
        )

    def _routes(self, prefix: str) -> list[tuple[str, str, Handler]]:
        return [
            ("GET", f"{prefix}/tools", self._tools),
            ("GET", f"{prefix}/task_tools", self._task_tools),
            ("GET", f"{prefix}/prompt", self._prompt),
            ("GET", f"{prefix}/messages", self._messages),
            ("POST", f"{prefix}/call", self._call),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Clients of this protocol send their key in a header of their own.
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if (key := headers.get(b"x-api-key")) is not None and b"authorization" not in headers:
                scope["headers"] = [*scope["headers"], (b"authorization", b"Bearer " + key)]
        await super().__call__(scope, receive, send)

    def error_response(self, error: HttpError) -> Response:
        """Convert an error to a response, in the form of FastAPI, which these clients read."""
        return JsonResponse({"detail": error.message}, error.status, error.headers)

    # Sessions

    async def _create_session(self, request: Request) -> Response:
        if unknown := set(read_object(request, 400)):
            raise HttpError(400, "not_supported", f"{sorted(unknown)!r:.200} cannot be set for a session here")
        # The name tells a session of this process from one of before its start.
        return _stream_of(f"{self._episodes.name}.{secrets.token_hex(16)}", b"")

    async def _create(self, request: Request) -> Response:
        sid = self._session_id(request)
        body = _validated(_Create, request)
        if sid in self._sessions:
            raise HttpError(400, "session_exists", "the session has begun already")
        if body.env_name not in (None, self._name):
            raise HttpError(404, "unknown_environment", f"unknown environment {body.env_name!r:.80}")
        rows = self._episodes.rows
        if rows is None or (body.split is not None and body.split != rows.split):
            served = "none is" if rows is None else f"{rows.split!r} is"
            raise HttpError(400, "bad_request", f"split is {body.split!r:.80}, and {served} served")
        index = body.index if body.task_spec is None else body.task_spec.get("index")
        if type(index) is not int:
            raise HttpError(400, "bad_request", "send a task_spec of /tasks, or split and index")
        self._sessions = {sid: each for sid, each in self._sessions.items() if self._episodes.find(each.id)}
        try:
            self._sessions[sid] = self._episodes.open(index)
        except CapacityError as error:
            raise HttpError(503, "overloaded", str(error), headers=RETRY_AFTER) from None
        except EpisodeError as error:
            raise HttpError(400, "bad_request", str(error)) from None
        return JsonResponse({"sid": sid})

    async def _ping(self, request: Request) -> Response:
        self._episode(request)
        return JsonResponse({"status": "ok"})

    async def _delete(self, request: Request) -> Response:
        sid = self._session_id(request)
        if (episode := self._sessions.pop(sid, None)) is not None:
            await episode.close()
        return JsonResponse({"sid": sid})

    def _session_id(self, request: Request) -> str:
        """Raises HttpError 400 without a session, and 410 for one of another process."""
        sid = request.headers.get(b"x-session-id", b"").decode("latin-1").strip()
        if not sid:
            raise HttpError(400, "no_session", "X-Session-ID header is required")
        if sid.partition(".")[0] != self._episodes.name:
            raise HttpError(410, "session_lost", "the session is of before this server's start; its state is lost")
        return sid

    def _episode(self, request: Request) -> ServedEpisode:
        """Raises HttpError 404 if the session has not begun, and 410 if it is not known any more."""
        sid = self._session_id(request)
        episode = self._sessions.get(sid)
        if episode is None:
            raise HttpError(404, "no_episode", "Active environment not found")
        if self._episodes.find(episode.id) is None:
            del self._sessions[sid]
            idle = self._episodes.limits.idle_seconds
            raise HttpError(410, "session_lost", f"the session was idle for {idle:g} s and is closed")
        episode.used_at = time.monotonic()
        return episode

    # Episodes

    async def _tools(self, request: Request) -> Response:
        self._check_environment(request)
        return JsonResponse(_tools_of(await self._episodes.tools()))

    async def _task_tools(self, request: Request) -> Response:
        self._check_environment(request)
        return JsonResponse(_tools_of(await self._episode(request).tools()))

    async def _prompt(self, request: Request) -> Response:
        self._check_environment(request)
        return JsonResponse([_block(message) for message in self._messages_of(request)])

    async def _messages(self, request: Request) -> Response:
        self._check_environment(request)
        messages = self._messages_of(request)
        return JsonResponse([{"role": message["role"], "blocks": [_block(message)]} for message in messages])

    def _messages_of(self, request: Request) -> list[dict[str, Any]]:
        row = self._episode(request).row
        return [] if row is None else row.messages

    async def _call(self, request: Request) -> Response:
        self._check_environment(request)
        call, sid = _validated(_Call, request), self._session_id(request)
        task: asyncio.Task[bytes] | None
        if call.task_id is None:
            task = asyncio.ensure_future(_run(self._episode(request), call))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            task_id = secrets.token_hex(16)
            self._tasks[task_id] = sid, task
            while len(self._tasks) > MAX_TASKS:
                self._tasks.popitem(last=False)
        else:
            task_id = call.task_id
            owner, task = self._tasks.get(task_id) or ("", None)
            if task is None or owner != sid:
                raise HttpError(410, "unknown_task", f"no call {task_id[:80]!r} of this session is known; it is lost")
        return EventStream(_event("task_id", task_id.encode()), _answer(task), _describe_error, end=b"")

    def _check_environment(self, request: Request) -> None:
        name = request.path_params.get("env_name", self._name)
        if name != self._name:
            raise HttpError(404, "unknown_environment", f"unknown environment {name[:80]!r}")


async def _run(episode: ServedEpisode, call: _Call) -> bytes:
    """The result of a call as JSON. Raises EpisodeLostError."""
    try:
        outcome = await call_or_submit(episode, call.name, call.input)
    except EpisodeError as error:
        return encode_json({"ok": False, "error": str(error), "reason": "input_validation"})
    if outcome.error in _REASONS:
        return encode_json({"ok": False, "error": outcome.text, "reason": _REASONS[outcome.error]})
    return encode_json({"ok": True, "output": _output_of(outcome)})


def _output_of(outcome: CallOutcome) -> dict[str, Any]:
    images = [uri.partition(";base64,") for uri in outcome.images]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": outcome.text, "detail": None}]
    blocks += [
        {"type": "image", "mimeType": kind.removeprefix("data:"), "data": data, "detail": None}
        for kind, _, data in images
    ]
    metadata = {"is_error": True} if outcome.is_error else None
    return {"blocks": blocks, "metadata": metadata, "reward": outcome.reward, "finished": outcome.done}


async def _answer(task: asyncio.Task[bytes]) -> AsyncGenerator[bytes, None]:
    """The events behind a task's id. The task goes on if the client leaves."""
    while not task.done():
        await asyncio.wait([task], timeout=_HEARTBEAT_SECONDS)
        if not task.done():
            yield HEARTBEAT
    if task.cancelled() or (error := task.exception()) is not None:
        words = "the episode was closed" if task.cancelled() else str(error)
        yield _event("error", words.replace("\n", " ").encode())
        return
    yield _event("end", task.result())


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def _stream_of(task_id: str, data: bytes) -> Response:
    return Response(_event("task_id", task_id.encode()) + _event("end", data), media_type="text/event-stream")


def _describe_error(error: Exception) -> tuple[int, object]:
    return 500, {"error": str(error)}


def _tools_of(tools: Any) -> dict[str, Any]:
    listed = [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in tools]
    terminal = {"name": SUBMIT, "arg": ARGUMENT, "description": DESCRIPTION["description"]}
    return {"tools": listed, "terminal_tool": terminal}


def _block(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": str(message.get("content") or ""), "detail": None}


def _validated(kind: Any, request: Request) -> Any:
    """Raises HttpError 422 that names the field."""
    try:
        return kind.model_validate(read_object(request, 400))
    except ValidationError as error:
        problem = error.errors()[0]
        words = f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
        raise HttpError(422, "bad_request", words[:300]) from None
