"""The gateway over HTTP: sessions, and in each the APIs of OpenAI and Anthropic.

POST /sessions                      open a session: its id, key, port and paths
POST /sessions/ID/v1/…              what an agent calls; or /v1/… with the session's key as API key
POST /sessions/ID/mcp               the tool server's tools, where the gateway has one
POST /sessions/ID/finish            end it: {"reward": 1.0} -> {"trajectory": …}
GET, DELETE /sessions/ID
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import re
import secrets
import time
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.gateway.conversation import AgentRequest
from verl_tool.gateway.dialects.base import Dialect, RequestError
from verl_tool.gateway.dialects.chat import ChatDialect
from verl_tool.gateway.dialects.messages import MessagesDialect, render_token_count
from verl_tool.gateway.dialects.responses import ResponsesDialect
from verl_tool.gateway.mcp_tools import GatewayTools
from verl_tool.gateway.session import AgentSession, PendingAnswer, SessionModel, SessionOptions
from verl_tool.http.disconnect import reject_disconnected
from verl_tool.http.event_stream import EventStream
from verl_tool.http.host_check import HostCheck
from verl_tool.http.messages import Disconnected, HttpError, JsonResponse
from verl_tool.http.metrics import HttpMetrics
from verl_tool.http.request_body import RequestBodies
from verl_tool.http.web_app import HEALTH_PATH, Handler, Request, WebApp
from verl_tool.servers.replica.mcp_endpoint import McpEndpoint
from verl_tool.util.json_text import BadJsonError, decode_request_json

MAX_BODY_BYTES = 64 << 20
PING_SECONDS = 15.0
_FINISHED = "the session was finished"
_MAX_FINISHED = 64
"""Finished sessions that are kept, so that finishing can be repeated."""
SESSIONS_PATH = "/sessions"
ONE_SESSION = f"{SESSIONS_PATH}/{{session_id}}"
_PROBED = ("", "/api/hello", "/v1/models")
_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 256
_MAX_REWARD = 1e9
_SESSION_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_IN_THREAD_BYTES = 256 << 10
"""Larger bodies are parsed in a thread."""
_SESSION_HEADER = b"x-session-id"
_MESSAGES = MessagesDialect()
DIALECTS: tuple[Dialect, ...] = (ChatDialect(), ResponsesDialect(), _MESSAGES)
AGENT_ROUTES = (
    *(("POST", dialect.path) for dialect in DIALECTS),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    *(("HEAD", path) for path in _PROBED),
)
"""What agents call, below a session's path, or with its key."""


class GatewayOptions(BaseModel):
    """Bounds of a gateway."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_name: str = "model"
    """What ``GET /v1/models`` tells."""
    sampling: dict[str, Any] = Field(default_factory=lambda: {"temperature": 1.0})
    """Parameters of every generation, with vLLM's names, where a session has no own."""
    max_sessions: int = Field(default=1024, ge=1)
    idle_seconds: float = Field(default=3600.0, gt=0)
    """A session that no request used for so long is closed."""
    admin_key: str | None = None
    """Asked of those who open and finish sessions; None: nobody is."""
    own_port: int | None = None
    """Port of this process alone, if several share the server's port. A session lives in one of them."""


class Gateway:
    """Sessions of agents with one model."""

    def __init__(
        self, model: SessionModel, options: GatewayOptions | None = None, tools: GatewayTools | None = None
    ) -> None:
        """tools: what agents may call over MCP."""
        self.model, self.options, self.tools = model, options or GatewayOptions(), tools
        self._mcp = McpEndpoint()
        self.sessions: dict[str, AgentSession] = {}
        self._by_key: weakref.WeakValueDictionary[bytes, AgentSession] = weakref.WeakValueDictionary()
        """By the hash of a session's key."""

    def app(
        self,
        *,
        for_agents: bool = False,
        metrics: HttpMetrics | None = None,
        host_check: HostCheck | None = None,
    ) -> WebApp:
        """An ASGI application of the gateway alone: agents call it by the path of their session, or by their key.
        for_agents: without the routes that open and finish sessions."""
        routes = [
            *(self._model_routes(ONE_SESSION) if for_agents else self.routes()),
            *self._model_routes(""),
            ("GET", HEALTH_PATH, self._health),
            ("HEAD", "/", self._probe),
            ("HEAD", "/api/hello", self._probe),
        ]
        bodies = RequestBodies(MAX_BODY_BYTES, 8 * MAX_BODY_BYTES)
        return WebApp(routes, metrics or HttpMetrics(CollectorRegistry()), bodies, host_check=host_check)

    def open_session(
        self,
        options: SessionOptions | None = None,
        session_id: str | None = None,
        *,
        call_extra: Mapping[str, Any] | None = None,
        listed_tools: Sequence[str] | None = None,
    ) -> AgentSession:
        """Open a session. call_extra, listed_tools: as of `GatewayTools.open`.

        Raises HttpError 503 if `max_sessions` are open, 409 if the id is in use, 501 if the model has no chat template.
        """
        self._close_idle()
        if sum(not session.is_finished for session in self.sessions.values()) >= self.options.max_sessions:
            message = f"max_sessions={self.options.max_sessions} sessions are open; finish some"
            raise HttpError(503, "overloaded", message, headers={"retry-after": "5"})
        session_id = session_id or secrets.token_hex(16)
        if session_id in self.sessions:
            raise HttpError(409, "session_exists", f"there is a session {session_id[:80]!r}; take another id")
        options = options or SessionOptions()
        options = options.model_copy(update={"sampling": self.options.sampling | options.sampling})
        try:
            tools = None if self.tools is None else self.tools.open(session_id, call_extra, listed_tools)
            session = AgentSession(session_id, self.model, options, tools=tools)
        except ConfigError as error:
            raise HttpError(501, "no_chat_template", str(error)) from error
        self.sessions[session.id] = session
        self._by_key[_hash_of(session.key)] = session
        finished = [each for each in self.sessions.values() if each.is_finished]
        for old in finished[: max(0, len(finished) - _MAX_FINISHED)]:
            del self.sessions[old.id]
        return session

    async def close(self) -> None:
        """End all sessions."""
        for session in list(self.sessions.values()):
            await session.finish()
        self.sessions.clear()

    def _close_idle(self) -> None:
        before = time.monotonic() - self.options.idle_seconds
        for session in [each for each in self.sessions.values() if each.used_at < before]:
            del self.sessions[session.id]
            asyncio.ensure_future(session.finish())  # noqa: RUF006 - it only cancels what is generated

    # Routes

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Routes below ``/sessions``, for another application too."""
        return [
            ("POST", SESSIONS_PATH, self._open),
            ("GET", ONE_SESSION, self._show),
            ("DELETE", ONE_SESSION, self._delete),
            ("POST", f"{ONE_SESSION}/finish", self._finish),
            *self._model_routes(ONE_SESSION),
        ]

    def _model_routes(self, prefix: str) -> list[tuple[str, str, Handler]]:
        return [
            *(("POST", prefix + dialect.path, self._answering(dialect)) for dialect in DIALECTS),
            ("POST", f"{prefix}/v1/messages/count_tokens", self._count_tokens),
            ("GET", f"{prefix}/v1/models", self._models),
            ("POST", f"{prefix}/mcp", self._call_tools),
            *(("HEAD", f"{prefix}{path}", self._probe) for path in _PROBED if prefix or path == "/v1/models"),
        ]

    async def _health(self, request: Request) -> Response:
        return JsonResponse({"status": "ok", "sessions": len(self.sessions)})

    async def _probe(self, request: Request) -> Response:
        return Response()

    async def _models(self, request: Request) -> Response:
        entry = {"id": self.options.model_name, "object": "model", "created": 0, "owned_by": "verl-tool"}
        return JsonResponse({"object": "list", "data": [entry]})

    async def _call_tools(self, request: Request) -> Response:
        session = self._session(request)
        if session.tools is None or session.is_finished:
            why = "is finished" if session.is_finished else "has no tools; this gateway has no tool server"
            raise HttpError(404, "no_tools", f"this session {why}")
        session.used_at = time.monotonic()
        session.tools.turns_left, session.tools.model_was_asked = session.turns_left, session.num_requests > 0
        return await self._mcp.serve(session.tools, request)

    async def _open(self, request: Request) -> Response:
        self._check_admin(request)
        fields = await _read_object(request.body)
        session_id = fields.pop("id", None)
        if session_id is not None and not (isinstance(session_id, str) and _SESSION_ID.fullmatch(session_id)):
            raise HttpError(400, "bad_request", "'id' must have 1 to 128 letters, digits, '.', '_' and '-'", "id")
        try:
            options = SessionOptions.model_validate(fields)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise HttpError(400, "bad_request", f"{where}: {problem['msg']}", where) from None
        session = self.open_session(options, session_id)
        path = f"{SESSIONS_PATH}/{session.id}"
        paths = {"openai": f"{path}/v1", "anthropic": path}
        return JsonResponse({"id": session.id, "key": session.key, "port": self.options.own_port, "paths": paths}, 201)

    async def _show(self, request: Request) -> Response:
        self._check_admin(request)
        session = self._by_id(request)
        turns = session.tree.turns
        state = "finished" if session.is_finished else "open"
        return JsonResponse({"id": session.id, "state": state, "turns": len(turns)})

    async def _finish(self, request: Request) -> Response:
        self._check_admin(request)
        session = self._by_id(request)
        fields = await _read_object(request.body)
        reward, extra = fields.get("reward"), fields.get("extra") or {}
        if reward is not None and not _is_number(reward):
            raise HttpError(400, "bad_request", f"'reward' is {reward!r:.80}; it must be a finite number", "reward")
        if not isinstance(extra, dict):
            raise HttpError(400, "bad_request", "'extra' must be an object", "extra")
        rollout = await session.finish(None if reward is None else float(reward), extra)
        record = msgspec.Raw(rollout.to_json().encode())
        return JsonResponse({"id": session.id, "requests": session.num_requests, "trajectory": record})

    async def _delete(self, request: Request) -> Response:
        self._check_admin(request)
        session = self._by_id(request)
        del self.sessions[session.id]
        await session.finish()
        return JsonResponse({"id": session.id, "state": "deleted"})

    async def _count_tokens(self, request: Request) -> Response:
        session = self._session(request)
        try:
            parsed = await _read_request(session, _MESSAGES, request)
            return JsonResponse(render_token_count(await session.count_tokens(parsed)))
        except RequestError as error:
            return JsonResponse(_MESSAGES.render_error(400, str(error)), 400)

    def _answering(self, dialect: Dialect) -> Handler:
        async def answer(request: Request) -> Response:
            try:
                session = self._session(request)
                parsed = await _read_request(session, dialect, request)
                _reject_stops(parsed)
                pending = await session.open_answer(parsed)
            except HttpError as error:
                return JsonResponse(dialect.render_error(error.status, error.message), error.status, error.headers)
            except RequestError as error:
                session.rejections.append(str(error))
                return JsonResponse(dialect.render_error(400, str(error)), 400)
            delivery = _Delivery(session, pending)
            try:
                # Not the task itself: it goes on for the next attempt if this connection breaks.
                await asyncio.wait([pending.task], timeout=PING_SECONDS if parsed.stream else None)
                if parsed.stream and not pending.has_failed:
                    rest = _events(dialect, parsed, delivery)
                    return _AnswerStream(await anext(rest), rest, _reject, end=b"")
                turn = pending.task.result()
            except asyncio.CancelledError:
                delivery.close()
                if not pending.task.cancelled():
                    raise
                return JsonResponse(dialect.render_error(500, _FINISHED), 500)
            except Exception as error:  # noqa: BLE001 - the engine's, which the agent is told
                delivery.close()
                status, headers = (error.status, error.headers) if isinstance(error, HttpError) else (500, None)
                return JsonResponse(dialect.render_error(status, _words(error)), status, headers)
            return _WholeAnswer(dialect.render_answer(turn.answer, parsed), delivery)

        return answer

    # Whose session it is

    def _session(self, request: Request) -> AgentSession:
        """The session of an agent's request: by path, by `X-Session-ID`, or by its API key. The key of one session does
        not open another."""
        by_key = self._by_key.get(_hash_of(key_of(request)))
        if by_key is not None and self.sessions.get(by_key.id) is not by_key:
            by_key = None
        if "session_id" in request.path_params:
            session: AgentSession | None = self._by_id(request)
        else:
            named = request.headers.get(_SESSION_HEADER, b"").decode("latin-1")
            session = (self.sessions.get(named) if named else None) or by_key
        if by_key is not None and session is not by_key:
            raise HttpError(403, "foreign_session", "the API key is that of another session; send this one's")
        if session is None:
            message = "no open session has this API key; open one with POST /sessions, and send its key"
            raise HttpError(401, "unauthorized", message)
        return session

    def _by_id(self, request: Request) -> AgentSession:
        session = self.sessions.get(request.path_params["session_id"])
        if session is None:
            where = "" if self.options.own_port is None else " here; use the port that POST /sessions gave"
            raise HttpError(404, "unknown_session", f"there is no such session{where}; open one with POST /sessions")
        return session

    def _check_admin(self, request: Request) -> None:
        key = self.options.admin_key
        if key is not None and not hmac.compare_digest(key_of(request).encode(), key.encode()):
            message = "opening, reading and finishing sessions needs the gateway's admin key as bearer token"
            raise HttpError(401, "unauthorized", message)


class _Delivery:
    """A connection that waits for an answer."""

    def __init__(self, session: AgentSession, pending: PendingAnswer) -> None:
        self._session, self.pending = session, pending
        self._open = True

    def close(self, *, delivered: bool = False) -> None:
        """The connection is closed, or has got all."""
        if self._open:
            self._open = False
            self._session.close_answer(self.pending, delivered=delivered)


class _WholeAnswer(JsonResponse):
    """An answer that is marked as delivered once it was sent."""

    def __init__(self, content: Any, delivery: _Delivery) -> None:
        super().__init__(content)
        self._delivery = delivery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await reject_disconnected(receive)
            await super().__call__(scope, receive, send)
            self._delivery.close(delivered=True)
        finally:
            self._delivery.close()


class _AnswerStream(EventStream):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await reject_disconnected(receive)
        except Disconnected:
            await self._rest.aclose()
            raise
        await super().__call__(scope, receive, send)


async def _events(dialect: Dialect, request: Any, delivery: _Delivery) -> AsyncGenerator[bytes, None]:
    """The answer as events once it is there, and pings until then, the first one at once."""
    try:
        task = delivery.pending.task
        while not task.done():
            yield dialect.ping
            await asyncio.wait([task], timeout=PING_SECONDS)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            yield dialect.render_error_event(500, _FINISHED if error is None else _words(error))
            return
        for part in dialect.stream_answer(task.result().answer, request):
            yield part
        delivery.close(delivered=True)
    finally:
        delivery.close()


def _reject(error: Exception) -> tuple[int, object]:
    return 500, {"error": {"message": _words(error)}}


def _words(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "the model gave no answer in time"
    return str(error) if isinstance(error, VerlToolError) else f"the engine failed: {type(error).__name__}"


def key_of(request: Request) -> str:
    """The API key that an agent sent, as OpenAI's clients or Anthropic's do; empty without one."""
    bearer = request.headers.get(b"authorization", b"").decode("latin-1")
    return bearer.removeprefix("Bearer ") or request.headers.get(b"x-api-key", b"").decode("latin-1")


def _hash_of(key: str) -> bytes:
    """What a key is found by: how long a search takes says nothing about keys."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _headers(request: Request) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers.items()}


async def _read_request(session: AgentSession, dialect: Dialect, request: Request) -> AgentRequest:
    arguments = request.body, dialect, _headers(request)
    try:
        if len(request.body) > _IN_THREAD_BYTES:
            return await asyncio.to_thread(session.reader.read, *arguments)
        return session.reader.read(*arguments)
    except BadJsonError as error:
        raise HttpError(400, "bad_request", f"the body is not JSON: {error}") from None


async def _read_object(body: bytes) -> dict[str, Any]:
    try:
        if len(body) > _IN_THREAD_BYTES:
            value = await asyncio.to_thread(decode_request_json, body)
        else:
            value = decode_request_json(body) if body else {}
    except ValueError as error:
        raise HttpError(400, "bad_request", f"the body is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise HttpError(400, "bad_request", "the body must be a JSON object")
    return dict(value)


def _reject_stops(request: AgentRequest) -> None:
    if len(request.stop) > _MAX_STOPS or any(len(stop) > _MAX_STOP_CHARACTERS for stop in request.stop):
        raise RequestError(f"stop: at most {_MAX_STOPS} strings of {_MAX_STOP_CHARACTERS} characters are looked for")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _MAX_REWARD and math.isfinite(value)
