"""Our tools and tasks as an OpenEnv environment (https://github.com/meta-pytorch/OpenEnv), as openenv 0.10 speaks it.

``/ws``: one connection is one session, with ``reset``, ``step`` (`list_tools`, `call_tool`), ``state`` and ``mcp``.
``POST /mcp``: the same tools as JSON-RPC, in a session that ``openenv/session/create`` opens and ``/ws?session_id=…``
may share. ``/schema``, ``/metadata``, ``/health``, and the list of tasks.

With rows, ``reset`` begins one of them, and the tool `submit.SUBMIT` ends it: its reward is the row's grader's.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import parse_qs

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from verl_tool.environments.served.episode import (
    CallOutcome,
    CapacityError,
    EpisodeError,
    EpisodeLostError,
    ServedEpisode,
    ServedEpisodes,
)
from verl_tool.environments.served.served_app import ServedApp
from verl_tool.environments.served.submit import DESCRIPTION, SCHEMA, call_or_submit
from verl_tool.environments.served.task_routes import TaskRoutes, describe_task
from verl_tool.http.host_check import HostCheck
from verl_tool.http.messages import HttpError, JsonResponse, path_of
from verl_tool.http.web_app import Request
from verl_tool.util.json_text import BadJsonError, decode_request_json, encode_json

MAX_MESSAGE_BYTES = 4 << 20
CLOSE_SECONDS = 10.0
"""For ``close`` of a session to free its state."""
_INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _SERVER_ERROR, _PARSE_ERROR = -32600, -32601, -32602, -32000, -32700
_GOING_AWAY, _SESSION_ENDED = 1001, 1011


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Reset(_Message):
    seed: int | None = Field(default=None, ge=0)
    """Chooses a row, if `index` does not."""
    episode_id: str | None = Field(default=None, max_length=255)
    """A name for ``state``, and nothing else."""
    index: int | None = Field(default=None, ge=0)
    """Of the row."""
    split: str | None = None


class _CallTool(_Message):
    type: Literal["call_tool"]
    tool_name: str
    arguments: dict[str, Any] = {}
    metadata: dict[str, Any] = {}


class _ListTools(_Message):
    type: Literal["list_tools"]
    metadata: dict[str, Any] = {}


class _Step(BaseModel):
    action: _CallTool | _ListTools = Field(discriminator="type")


class _RpcRequest(_Message):
    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = {}
    id: str | int | None = None


class ProtocolError(Exception):
    """A message is answered with an error; the session goes on."""

    def __init__(self, code: str, message: str, **data: Any) -> None:
        super().__init__(message)
        self.code, self.message, self.data = code, message, data


@dataclass
class _Outcome:
    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False

    def as_data(self) -> dict[str, Any]:
        observation = {"metadata": {}, **self.observation}
        return {"observation": observation, "reward": self.reward, "done": self.done}


class OpenEnvSession:
    """One session: at most one episode at a time."""

    def __init__(self, episodes: ServedEpisodes, *, by_id: bool) -> None:
        """by_id: its client names it in each request, so that it can begin without ``reset``: a client that lost it is
        told so. A connection's client reconnects without a word, and must not find a fresh session."""
        self.id = secrets.token_hex(16)
        self.by_id, self.is_attached = by_id, False
        self.used_at = time.monotonic()
        self._episodes = episodes
        self._episode: ServedEpisode | None = None
        self._label = ""
        self._steps = 0

    async def reset(self, data: Mapping[str, Any]) -> _Outcome:
        """Begin an episode; one in progress is closed."""
        options = _validated(_Reset, data)
        rows = self._episodes.rows
        if options.split is not None and (rows is None or options.split != rows.split):
            served = "none is" if rows is None else f"{rows.split!r} is"
            raise ProtocolError("VALIDATION_ERROR", f"split is {options.split[:80]!r}, and {served} served")
        index = options.index
        if index is None and options.seed is not None and rows is not None:
            index = options.seed % len(rows)
        self._episodes.row(index)  # a row that is not there does not end the episode
        before, self._episode = self._episode, None
        if before is not None:
            await before.close()
        self._begin(index, options.episode_id)
        return _Outcome(describe_task(self._episode.row) if self._episode and self._episode.row else {"messages": []})

    def _begin(self, index: int | None, label: str | None = None) -> ServedEpisode:
        episode = self._episode = self._episodes.open(index)
        self._label, self._steps = label or episode.id, 0
        return episode

    async def step(self, data: Mapping[str, Any]) -> _Outcome:
        """Run one action."""
        action = _validated(_Step, {"action": data}).action
        if isinstance(action, _ListTools):
            return _Outcome({"tools": await self.tools()})
        outcome = await self.call(action.tool_name, action.arguments)
        observation: dict[str, Any] = {"tool_name": action.tool_name, "result": None, "error": None}
        if outcome.error:
            observation["error"] = {"error_type": outcome.error, "message": outcome.text}
        else:
            observation["result"] = _tool_result(outcome)
        return _Outcome(observation, outcome.reward, outcome.done)

    async def tools(self) -> list[dict[str, Any]]:
        """The tools of the episode, or of the server before there is one."""
        described = await (self._episode or self._episodes).tools()
        tools = [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in described]
        return [*tools, {**DESCRIPTION, "input_schema": SCHEMA}] if self._episodes.rows is not None else tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallOutcome:
        """Call a tool. In a row's episode, the reward of the call that ends it is the grader's."""
        episode = self._episode
        if episode is None and self.by_id:
            episode = self._begin(None)
        if episode is None:
            raise ProtocolError(
                "EXECUTION_ERROR",
                "there is no episode on this connection: send reset. An episode ends with its connection",
            )
        self._steps += 1
        return await call_or_submit(episode, name, arguments)

    def state(self) -> dict[str, Any]:
        return {"episode_id": self._label or None, "step_count": self._steps}

    async def close(self) -> None:
        if self._episode is not None:
            await self._episode.close()


class OpenEnvApp(ServedApp):
    """The environment over HTTP and WebSocket."""

    schema: ClassVar[dict[str, Any]] = {
        "action": {
            "title": "CallToolAction",
            "type": "object",
            "required": ["type", "tool_name"],
            "additionalProperties": False,
            "properties": {
                "type": {"const": "call_tool", "type": "string"},
                "tool_name": {"type": "string"},
                "arguments": {"type": "object"},
                "metadata": {"type": "object"},
            },
        },
        "observation": {
            "title": "CallToolObservation",
            "type": "object",
            "properties": {
                "tool_name": {"type": "string"},
                "result": {},
                "error": {},
                "metadata": {"type": "object"},
                "done": {"type": "boolean"},
                "reward": {"type": ["number", "null"]},
            },
        },
        "reset_observation": {
            "title": "Task",
            "type": "object",
            "properties": {"messages": {"type": "array"}, "index": {"type": "integer"}},
        },
        "state": {
            "title": "State",
            "type": "object",
            "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}},
        },
    }

    def __init__(
        self,
        episodes: ServedEpisodes,
        *,
        name: str = "verl_tool",
        api_key: str | None = None,
        host_check: HostCheck | None = None,
    ) -> None:
        self._sessions: dict[str, OpenEnvSession] = {}
        super().__init__(
            episodes,
            [
                ("GET", "/metadata", self._metadata),
                ("GET", "/schema", self._schema),
                ("POST", "/mcp", self._mcp),
                ("POST", "/reset", self._without_session),
                ("POST", "/step", self._without_session),
                ("GET", "/state", self._without_session),
                *TaskRoutes(episodes, name).routes(),
            ],
            name=name,
            api_key=api_key,
            host_check=host_check,
            max_body_bytes=MAX_MESSAGE_BYTES,
            count_sessions=self._sessions.__len__,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await super().__call__(scope, receive, send)
            return
        scope["path"], scope["root_path"] = path_of(scope), ""
        socket = WebSocket(scope, receive, send)
        try:
            self._check(scope, Request())
            if scope["path"] != "/ws":
                raise HttpError(404, "unknown_path", f"there is no WebSocket at {scope['path'][:80]!r}; connect to /ws")
        except HttpError as error:
            await socket.send_denial_response(self.error_response(error))
            return
        with contextlib.suppress(WebSocketDisconnect, asyncio.TimeoutError):
            await socket.accept()
            await _Connection(self, socket).serve()

    # Sessions

    def open_session(self, *, by_id: bool) -> OpenEnvSession:
        """Raises ProtocolError if there are too many."""
        limit = self._episodes.limits.max_episodes
        if len(self._sessions) >= limit:
            message = f"{len(self._sessions)} of {limit} sessions are open; close some, or raise --max_episodes"
            raise ProtocolError("CAPACITY_REACHED", message, active_sessions=len(self._sessions), max_sessions=limit)
        session = OpenEnvSession(self._episodes, by_id=by_id)
        self._sessions[session.id] = session
        return session

    def attach(self, session_id: str) -> OpenEnvSession:
        """The session for a connection. Raises ProtocolError if it has one already."""
        session = self.session(session_id)
        if session.is_attached:
            raise ProtocolError("SESSION_ERROR", f"session {session_id[:80]} already has a connection")
        session.is_attached = True
        return session

    def session(self, session_id: object) -> OpenEnvSession:
        """Raises ProtocolError if it is not open."""
        session = self._sessions.get(session_id) if isinstance(session_id, str) else None
        if session is None:
            message = (
                f"session {str(session_id)[:80]!r} is not open here: it was closed, was idle for "
                f"{self._episodes.limits.idle_seconds:g} s, or is of before this server's start. Its state is lost"
            )
            raise ProtocolError("SESSION_ERROR", message)
        session.used_at = time.monotonic()
        return session

    async def close_session(self, session: OpenEnvSession) -> None:
        self._sessions.pop(session.id, None)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(session.close(), CLOSE_SECONDS)

    async def close_idle(self) -> None:
        """Close the sessions without a connection that nobody used for `EpisodeLimits.idle_seconds`."""
        before = time.monotonic() - self._episodes.limits.idle_seconds
        for session in [s for s in self._sessions.values() if s.used_at < before and not s.is_attached]:
            await self.close_session(session)

    @property
    def idle_seconds(self) -> float:
        return self._episodes.limits.idle_seconds

    # JSON-RPC

    async def _mcp(self, request: Request) -> Response:
        await self.close_idle()
        try:
            value = decode_request_json(request.body)
        except BadJsonError as error:
            return JsonResponse(_rpc_error(None, _PARSE_ERROR, str(error)))
        return JsonResponse(await self.answer_rpc(value))

    async def answer_rpc(self, value: object, session: OpenEnvSession | None = None) -> dict[str, Any]:
        """The answer to a JSON-RPC request. session: that of the connection on which it came."""
        try:
            call = _RpcRequest.model_validate(value)
        except ValidationError as error:
            return _rpc_error(None, _INVALID_REQUEST, f"Invalid request: {_problem(error)}")
        try:
            return {"jsonrpc": "2.0", "id": call.id, "result": await self._run_rpc(call, session)}
        except ProtocolError as error:
            code = _INVALID_PARAMS if error.code in ("SESSION_ERROR", "VALIDATION_ERROR") else _SERVER_ERROR
            code = _NO_METHOD if error.code == "UNKNOWN_TYPE" else code
            return _rpc_error(call.id, code, error.message, error.data or None)
        except (EpisodeError, EpisodeLostError, CapacityError) as error:
            return _rpc_error(call.id, _SERVER_ERROR, str(error))

    async def _run_rpc(self, call: _RpcRequest, session: OpenEnvSession | None) -> dict[str, Any]:
        params = call.params
        if call.method == "openenv/session/create":
            session = session or self.open_session(by_id=True)
            return {"session_id": session.id}
        if call.method == "openenv/session/close":
            return await self._close_rpc(params.get("session_id"), session)
        if session is None and (call.method == "tools/call" or "session_id" in params):
            session = self.session(params.get("session_id"))
        if call.method == "tools/list":
            session = session or OpenEnvSession(self._episodes, by_id=False)
            return {"tools": await session.tools()}
        if call.method != "tools/call":
            known = "tools/list, tools/call, openenv/session/create, openenv/session/close"
            raise ProtocolError("UNKNOWN_TYPE", f"Method not found: {call.method[:80]}; known: {known}")
        name, arguments = params.get("name"), params.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ProtocolError("VALIDATION_ERROR", "params must have 'name', a text, and 'arguments', an object")
        assert session is not None
        outcome = await session.call(name, arguments)
        if outcome.error:
            data = {"error_type": outcome.error, "reward": outcome.reward, "done": outcome.done}
            raise ProtocolError("VALIDATION_ERROR", outcome.text, **data)
        return {**_tool_result(outcome), "meta": {"reward": outcome.reward, "done": outcome.done}}

    async def _close_rpc(self, session_id: object, own: OpenEnvSession | None) -> dict[str, Any]:
        session = self.session(session_id)
        if session is own:
            raise ProtocolError("VALIDATION_ERROR", f"session {session.id} is this connection's; close that")
        if session.is_attached:
            session.by_id = False  # it ends with its connection
            return {"session_id": session.id, "closed": False, "closing": True}
        await self.close_session(session)
        return {"session_id": session.id, "closed": True}

    # Routes

    async def _metadata(self, _: Request) -> Response:
        names = ", ".join(tool.name for tool in await self._episodes.tools())
        rows = self._episodes.rows
        tasks = "" if rows is None else f" {len(rows)} tasks ({rows.split})."
        return JsonResponse({"name": self._name, "description": f"Tools of verl-tool: {names}.{tasks}"})

    async def _schema(self, _: Request) -> Response:
        return JsonResponse(self.schema)

    async def _without_session(self, _: Request) -> Response:
        raise HttpError(501, "no_session", "HTTP keeps no session; connect to /ws, or use /mcp with a session_id")


class _Connection:
    """One WebSocket."""

    def __init__(self, app: OpenEnvApp, socket: WebSocket) -> None:
        self._app, self._socket = app, socket

    async def serve(self) -> None:
        """Answer messages until one side closes. The session ends with its connection, unless it has its own id."""
        named = parse_qs(self._socket.scope.get("query_string", b"").decode("latin-1")).get("session_id")
        await self._app.close_idle()
        try:
            session = self._app.attach(named[0]) if named else self._app.open_session(by_id=False)
        except ProtocolError as error:
            await self._send_error(error.code, error.message, **error.data)
            await self._socket.close(_SESSION_ENDED)
            return
        session.is_attached = True
        try:
            await self._answer_all(session)
        finally:
            session.is_attached = False
            if not session.by_id:
                await asyncio.shield(asyncio.ensure_future(self._app.close_session(session)))

    async def _answer_all(self, session: OpenEnvSession) -> None:
        incoming, work = asyncio.ensure_future(self._receive()), None
        try:
            while True:
                await asyncio.wait([incoming], timeout=self._app.idle_seconds)
                if not incoming.done():
                    message = f"no message came for {self._app.idle_seconds:g} s; the session is closed"
                    await self._send_error("SESSION_ERROR", message)
                    await self._socket.close(_GOING_AWAY)
                    return
                text = incoming.result()
                session.used_at = time.monotonic()
                # The next message is awaited meanwhile, since only that tells of a client that left.
                incoming = asyncio.ensure_future(self._receive())
                work = asyncio.ensure_future(self._answer(session, text))
                await asyncio.wait([work, incoming], return_when=asyncio.FIRST_COMPLETED)
                if not work.done() and incoming.exception() is not None:
                    return
                if not await work:
                    return
        finally:
            left = [task for task in (incoming, work) if task is not None]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _receive(self) -> str:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        return message.get("text") or (message.get("bytes") or b"").decode("utf-8", "replace")

    async def _answer(self, session: OpenEnvSession, text: str) -> bool:
        """Answer one message; whether the session goes on."""
        try:
            message = decode_request_json(text.encode("utf-8", "replace"))
            if not isinstance(message, dict):
                raise BadJsonError("the message is not an object")
        except BadJsonError as error:
            await self._send_error("INVALID_JSON", str(error))
            return True
        try:
            answer = await self._run(session, message)
        except ProtocolError as error:
            await self._send_error(error.code, error.message, **error.data)
        except CapacityError as error:
            await self._send_error("CAPACITY_REACHED", str(error))
        except EpisodeError as error:
            await self._send_error("EXECUTION_ERROR", str(error))
        except EpisodeLostError as error:
            await self._send_error("SESSION_ERROR", f"the episode is lost: {error}")
            await self._socket.close(_SESSION_ENDED)
            return False
        else:
            if answer is None:
                session.is_attached = False  # its client may close it by /mcp as soon as this connection has ended
                await self._socket.close()
                return False
            await self._send(answer)
        return True

    async def _run(self, session: OpenEnvSession, message: Mapping[str, Any]) -> dict[str, Any] | None:
        kind, data = message.get("type"), message.get("data", {})
        if kind == "close":
            return None
        if kind == "state":
            return {"type": "state", "data": session.state()}
        if kind not in ("reset", "step", "mcp"):
            raise ProtocolError("UNKNOWN_TYPE", f"Unknown message type: {str(kind)[:80]}")
        if not isinstance(data, dict):
            raise ProtocolError("VALIDATION_ERROR", "data must be an object")
        if kind == "mcp":
            return {"type": "mcp", "data": await self._app.answer_rpc(data, session)}
        outcome = await (session.reset(data) if kind == "reset" else session.step(data))
        return {"type": "observation", "data": outcome.as_data()}

    async def _send(self, value: Mapping[str, Any]) -> None:
        await self._socket.send_text(encode_json(value).decode())

    async def _send_error(self, code: str, message: str, **data: Any) -> None:
        await self._send({"type": "error", "data": {"message": message, "code": code, **data}})


def _tool_result(outcome: CallOutcome) -> dict[str, Any]:
    """A tool's answer as fastmcp writes it."""
    images = [uri.partition(";base64,") for uri in outcome.images]
    content = [
        {"type": "text", "text": outcome.text},
        *({"type": "image", "mimeType": kind.removeprefix("data:"), "data": data} for kind, _, data in images),
    ]
    return {"content": content, "structured_content": None, "data": outcome.text, "is_error": outcome.is_error}


def _validated(kind: Any, data: Mapping[str, Any]) -> Any:
    """Raises ProtocolError that names the field."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise ProtocolError("VALIDATION_ERROR", f"Invalid message: {_problem(error)}", errors=problems[:8]) from None


def _problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"[:300]


def _rpc_error(request_id: str | int | None, code: int, message: str, data: Any = None) -> dict[str, Any]:
    error = {"code": code, "message": message} | ({} if data is None else {"data": data})
    return {"jsonrpc": "2.0", "id": request_id, "error": error}
