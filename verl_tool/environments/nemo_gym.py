"""Environments of a NeMo-Gym resources server (https://github.com/NVIDIA-NeMo/Gym).

A row is an object with the Responses API's ``responses_create_params`` (messages and tools) and fields of its server. A
session is a signed cookie of the server:

- with tools: ``POST /seed_session`` with the row, ``POST /<tool>`` for each call, and ``POST /verify`` with the row and
  the transcript, which gives the reward
- of the gymnasium kind: ``POST /reset`` with the row, and ``POST /step`` for each turn, which gives a reward

A server that was restarted accepts the cookies of its predecessor and has none of its sessions: tools find a fresh
state, and ``/verify`` gives 0. `ProcessWatch` notices that, and all sessions of the predecessor are lost.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
from pydantic import Field, SecretStr

from verl_tool.client.exchange import KEEP_ALIVE_SECONDS, TooLongError, read_bounded
from verl_tool.environments.environment_tool import Environment
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.formats import Call
from verl_tool.formats.scan import split_thoughts
from verl_tool.protocol import Fault, FaultKind, Opening, Role, ToolDescription
from verl_tool.servers.tools._service import base_url, key_headers
from verl_tool.servers.tools.base import Context, InvalidCall, ToolOptions, ToolResult
from verl_tool.util.json_text import decode_json, encode_json, excerpt
from verl_tool.verification import ENVIRONMENT_STYLE, Verdict

Json = dict[str, Any]
PARAMETERS = "responses_create_params"
"""Field of a row with messages and tools."""
RESERVED = frozenset({"seed_session", "close_session", "verify", "aggregate_metrics", "reset", "step", "close", "mcp"})
"""Routes of the server that are no tools."""
MAX_TOOLS = 128
MAX_NUMBERS = 64
"""Numbers of an answer to ``/verify`` that go into the record of a trajectory."""
CLOSE_SECONDS = 5.0
KEEP_ALIVE_PROBES = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""After how many seconds a host that vanished is noticed."""
_TOOL_NAME = re.compile(r"[\w.-]{1,128}")
_FAILING = (429, 502, 503, 504)
"""Statuses of a server that is busy, or of what stands between."""
_ROUTES = ("/seed_session", "/reset", "/step", "/verify", "/close")
"""Those of the protocol; any other is a tool's."""
_UNKNOWN = (404, 405, 422)
"""Statuses of a call that the server cannot read."""
_LOST_SESSIONS = ("session_lost", "session_expired")


class NemoGymOptions(ToolOptions):
    """Where the server is, and limits of one episode."""

    url: str = "http://127.0.0.1:8000"
    """Base address, such as ``http://127.0.0.1:8000``: of one process that keeps its sessions."""
    api_key: SecretStr | None = None
    """Bearer token, if the server wants one."""
    kind: Literal["auto", "tools", "gymnasium"] = "auto"
    """``auto``: by the server's routes."""
    connect_seconds: float = Field(default=10.0, gt=0)
    begin_seconds: float = Field(default=120.0, gt=0)
    """For the answer to ``/seed_session`` or ``/reset``."""
    step_seconds: float = Field(default=60.0, gt=0)
    """For the answer to a call. A later one is the fault ``timeout``."""
    verify_seconds: float = Field(default=60.0, gt=0)
    """For the answer to ``/verify``. A server that asks a model may need more, and `tool_call_timeout` as much."""
    max_answer_bytes: int = Field(default=4 << 20, ge=1 << 10)
    """Size of one answer."""
    max_episodes: int | None = Field(default=None, ge=1)
    """Episodes at once of each replica. A further one is the fault ``overloaded``, which is retried."""
    watch_process: bool = True
    """Notice that the server was restarted, by a connection that stays open. This needs a direct connection: a proxy
    closes idle ones, and keeps them as the server restarts."""


@dataclass
class RecordedCall:
    name: str
    arguments: str
    output: str


@dataclass
class RecordedTurn:
    """One turn of the model."""

    step: int | None
    text: str
    """All of it until a call is recorded; then what precedes the first call."""
    calls: list[RecordedCall] = field(default_factory=list)


@dataclass
class NemoGymSession:
    """One session of the server."""

    row: Json
    gymnasium: bool
    watch: ProcessWatch | None
    cookies: dict[str, str] = field(default_factory=dict)
    turns: list[RecordedTurn] = field(default_factory=list)
    info: Json = field(default_factory=dict)
    """Of the answer to ``/reset``."""


class NemoGymEnvironment(Environment):
    """A client of one server."""

    name = "nemo_gym"
    description = "An environment of a NeMo-Gym resources server."
    Options = NemoGymOptions
    options: NemoGymOptions

    @property
    def verdict_seconds(self) -> float:
        return self.options.verify_seconds

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._url = base_url(self.name, self.options.url)
        if self.options.watch_process and urlsplit(self._url).scheme != "http":
            words = "a restart of the server cannot be noticed through https; use http, or set watch_process to false"
            raise ConfigError(f"tool {self.name}: option url is {self.options.url!r:.80}: {words}")
        self.max_live = self.options.max_episodes  # type: ignore[misc]
        key = self.options.api_key
        self._headers = key_headers(self.name, None if key is None else key.get_secret_value())
        self._http: aiohttp.ClientSession | None = None
        self._gymnasium = None if self.options.kind == "auto" else self.options.kind == "gymnasium"
        self._watch: ProcessWatch | None = None
        self._watching, self._reading = asyncio.Lock(), asyncio.Lock()

    async def check_needs(self) -> None:
        try:
            await self._read_kind()
        finally:
            await self.close()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._http is not None:
            http, self._http = self._http, None
            await http.close()

    async def begin(self, trajectory_id: str, arguments: Mapping[str, Any]) -> tuple[NemoGymSession, Opening]:
        row = arguments.get("row")
        if not isinstance(row, dict) or not isinstance(row.get(PARAMETERS), dict):
            words = f"tools_kwargs.environment.row is {excerpt(row)}; it must be an object with {PARAMETERS}"
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        tools = read_tools(row[PARAMETERS].get("tools"))
        watch = await self._process_watch()
        session = NemoGymSession(row, await self._read_kind(), watch)
        path = "/reset" if session.gymnasium else "/seed_session"
        try:
            status, body = await self._post(session, path, row, self.options.begin_seconds)
        except ToolFault as fault:
            if fault.kind in (FaultKind.STATE_LOST, FaultKind.TIMEOUT):
                raise ToolFault(FaultKind.UNREACHABLE, fault.message, retryable=True) from fault
            raise
        if status != 200:
            raise self._unexpected(path, status, body)
        if not session.gymnasium:
            return session, Opening(tools=tools)
        answer = self._object(path, body)
        session.info = answer["info"] if isinstance(answer.get("info"), dict) else {}
        observation = answer.get("observation")
        messages = [{"role": "user", "content": str(observation)}] if observation else []
        return session, Opening(messages=messages, tools=tools, every_turn=True)

    async def run(self, call: Call, context: Context) -> ToolResult:
        session: NemoGymSession = context.state.session
        if not session.turns or context.step is None or session.turns[-1].step != context.step:
            session.turns.append(RecordedTurn(context.step, context.action))
        return await super().run(call, context)

    async def step(self, session: NemoGymSession, call: Call) -> ToolResult:
        if session.gymnasium:
            return await self._step(session, call)
        arguments = _arguments_of(call)
        status, body = await self._post(session, f"/{call.name}", arguments, self.options.step_seconds)
        text = body.decode("utf-8", "replace")
        _record(session, call, arguments, text)
        # The agent of NeMo-Gym gives the model whatever the server answers.
        return ToolResult(text, valid=status not in _UNKNOWN, error=status >= 400 and status not in _UNKNOWN)

    async def verdict(
        self, session: NemoGymSession, text: str, data: Mapping[str, Any], rewards: list[float]
    ) -> Verdict:
        if session.gymnasium:
            return Verdict(sum(rewards))
        turns = [*session.turns, RecordedTurn(None, text)] if text else session.turns
        body = {**session.row, **data, "response": build_response(session.row, turns)}
        status, answered = await self._post(session, "/verify", body, self.options.verify_seconds)
        if status >= 500:
            words = f"{self._url}/verify: HTTP {status}: {excerpt(answered.decode('utf-8', 'replace'))}"
            raise ToolFault(FaultKind.TOOL_CRASHED, words, retryable=False)
        if status != 200:
            raise self._unexpected("/verify", status, answered)
        return self._read_verdict(self._object("/verify", answered))

    async def end(self, session: NemoGymSession) -> None:
        if session.info.get("supports_explicit_close") is True:
            await self._post(session, "/close", {}, CLOSE_SECONDS)

    async def _step(self, session: NemoGymSession, call: Call) -> ToolResult:
        """Play one turn of an environment of the gymnasium kind."""
        turn = session.turns[-1]
        whole = call.name == self.name
        role: Role = "user" if whole else "tool"
        if turn.calls:
            raise InvalidCall("this environment takes one call in a turn; make the next one in your next turn")
        if not whole:
            _record(session, call, _arguments_of(call), "")
        body = {**session.row, "response": build_response(session.row, [turn], outputs=False)}
        if session.info.get("supports_step_idempotency") is True:
            body["_ng_step_request_id"] = uuid.uuid4().hex
        status, answered = await self._post(session, "/step", body, self.options.step_seconds)
        if status >= 500:
            return ToolResult(answered.decode("utf-8", "replace"), error=True, role=role)
        if status != 200:
            raise self._unexpected("/step", status, answered)
        answer = self._object("/step", answered)
        info = answer["info"] if isinstance(answer.get("info"), dict) else {}
        outputs = [str(each.get("output")) for each in info.get("tool_outputs") or () if isinstance(each, Mapping)]
        texts = [*outputs, str(answer.get("observation") or "")]
        reward = answer.get("reward")
        return ToolResult(
            "\n".join(text for text in texts if text),
            done=answer.get("terminated") is True or answer.get("truncated") is True,
            truncated=answer.get("terminated") is not True,
            reward=float(reward) if isinstance(reward, int | float) else None,
            role=role,
        )

    def _read_verdict(self, answer: Json) -> Verdict:
        reward = answer.get("reward")
        if not isinstance(reward, int | float):
            words = f"{self._url}/verify gave the reward {excerpt(reward)}, which is no number"
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        numbers = {
            name: float(value)
            for name, value in answer.items()
            if isinstance(value, int | float) and name not in ("reward", "mask_sample")
        }
        numbers = dict(list(numbers.items())[:MAX_NUMBERS])
        if answer.get("mask_sample") is not True:
            return Verdict(float(reward), numbers=numbers)
        reason = str(answer.get("failure_kind") or "")
        kind = FaultKind.STATE_LOST if reason in _LOST_SESSIONS else FaultKind.UNREACHABLE
        words = f"{self._url} masks this sample: {reason or 'no kind'}: {answer.get('failure_reason') or 'no reason'}"
        return Verdict(numbers=numbers, fault=Fault(kind=kind, message=words[:1000], retryable=False))

    async def _post(
        self, session: NemoGymSession, path: str, body: Mapping[str, Any], seconds: float
    ) -> tuple[int, bytes]:
        """Send a request of a session and return status and body. Raises ToolFault, of the kind ``state_lost`` if the
        process that has the session has ended."""
        self._check_alive(session)
        headers = {"content-type": "application/json", **self._headers}
        if session.cookies:
            headers["cookie"] = "; ".join(f"{name}={value}" for name, value in session.cookies.items())
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, self.options.connect_seconds))
        try:
            async with self._open().post(
                f"{self._url}{path}", data=encode_json(body), headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                status, answer = response.status, await read_bounded(response, self.options.max_answer_bytes)
                cookies: SimpleCookie = response.cookies
        except aiohttp.ConnectionTimeoutError as error:
            raise ToolFault(FaultKind.STATE_LOST, f"no connection to {self._url}{path}", retryable=False) from error
        except asyncio.TimeoutError as error:
            self._check_alive(session)
            words = f"no answer from {self._url}{path} within {seconds:g} s"
            raise ToolFault(FaultKind.TIMEOUT, words, retryable=False) from error
        except TooLongError as error:
            words = f"the answer of {self._url}{path} is longer than max_answer_bytes={self.options.max_answer_bytes}"
            raise ToolFault(FaultKind.TOOL_CRASHED, words, retryable=False) from error
        except (aiohttp.ClientError, OSError) as error:
            words = f"{self._url}{path}: {str(error) or type(error).__name__}"
            raise ToolFault(FaultKind.STATE_LOST, words, retryable=False) from error
        self._check_alive(session)
        session.cookies.update({name: morsel.value for name, morsel in cookies.items()})
        # A tool says by any other status what it thinks of the call.
        if status in _FAILING or (path in _ROUTES and (status in (401, 403) or 300 <= status < 400)):
            raise self._unexpected(path, status, answer)
        return status, answer

    def _check_alive(self, session: NemoGymSession) -> None:
        if session.watch is not None and session.watch.has_ended():
            words = f"the server at {self._url} was restarted, or a proxy closed its idle connection (watch_process)"
            raise ToolFault(FaultKind.STATE_LOST, words, retryable=False)

    async def _process_watch(self) -> ProcessWatch | None:
        """Return a watch of the process that serves now. Raises ToolFault."""
        if not self.options.watch_process:
            return None
        async with self._watching:
            if self._watch is None or self._watch.has_ended():
                parts = urlsplit(self._url)
                seconds = self.options.connect_seconds
                try:
                    connect = ProcessWatch.open(str(parts.hostname), parts.port or 80)
                    self._watch = await asyncio.wait_for(connect, seconds)
                except (asyncio.TimeoutError, OSError) as error:
                    words = f"no connection to {self._url} within {seconds:g} s: {str(error) or 'timeout'}"
                    raise ToolFault(FaultKind.UNREACHABLE, words, retryable=True) from error
            return self._watch

    async def _read_kind(self) -> bool:
        """Return whether the server is of the gymnasium kind, by its routes: they do not take GET. Raises ToolFault."""
        async with self._reading:
            if self._gymnasium is None:
                if await self._has_route("/seed_session"):
                    self._gymnasium = False
                elif await self._has_route("/reset"):
                    self._gymnasium = True
                else:
                    words = f"{self._url} has neither a route /seed_session nor /reset; set the options url and kind"
                    raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
            return self._gymnasium

    async def _has_route(self, path: str) -> bool:
        url, seconds = f"{self._url}{path}", self.options.begin_seconds
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=self.options.connect_seconds)
        try:
            async with self._open().get(url, headers=self._headers, timeout=timeout, allow_redirects=False) as response:
                return response.status == HTTPStatus.METHOD_NOT_ALLOWED
        except (asyncio.TimeoutError, aiohttp.ClientError, OSError) as error:
            words = f"no answer from {url} within {seconds:g} s: {str(error) or type(error).__name__}"
            raise ToolFault(FaultKind.UNREACHABLE, words, retryable=True) from error

    def _object(self, path: str, body: bytes) -> Json:
        """Raises ToolFault."""
        try:
            value = decode_json(body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            words = f"{self._url}{path} answered {excerpt(body.decode('utf-8', 'replace'))}, which is no object"
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        return value

    def _unexpected(self, path: str, status: int, body: bytes) -> ToolFault:
        # A server may quote the key that it does not know.
        detail = "set the option api_key" if status in (401, 403) else body[:300].decode("utf-8", "replace")
        words = f"{self._url}{path}: HTTP {status}: {detail}"
        busy = status in _FAILING
        retryable = busy and path in ("/seed_session", "/reset")
        return ToolFault(FaultKind.OVERLOADED if busy else FaultKind.MISCONFIGURED, words, retryable)

    def _open(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._http = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._http


class ProcessWatch:
    """A connection on which nothing is sent: it is open as long as the process that accepted it lives.

    The server (uvicorn) sets no deadline for the first request of a connection. The kernel closes the connections of a
    process that ends, before another one can listen at its port; so a request that a successor answered finds the
    watch ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._ended = False

    @classmethod
    async def open(cls, host: str, port: int) -> ProcessWatch:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        problem: OSError | None = None
        for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            connection = socket.socket(family, kind, protocol)
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in KEEP_ALIVE_PROBES:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
                await loop.sock_connect(connection, address)
                return cls(connection)
            except OSError as error:
                connection.close()
                problem = error
            except BaseException:
                connection.close()
                raise
        raise problem or OSError(f"{host} has no address")

    def has_ended(self) -> bool:
        """Return whether the connection is closed by now, as the kernel knows it."""
        if not self._ended:
            try:
                self._connection.recv(1, socket.MSG_PEEK)
                self._ended = True  # it is closed, or something answers what was not asked
            except BlockingIOError:
                return False
            except OSError:
                self._ended = True
            self._connection.close()
        return True

    def close(self) -> None:
        self._ended = True
        self._connection.close()


def read_tools(listed: object) -> list[ToolDescription]:
    """Return the function tools of a row. Raises ToolFault."""
    if listed is None:
        return []
    try:
        if not isinstance(listed, list) or len(listed) > MAX_TOOLS:
            raise ValueError(f"at most {MAX_TOOLS} in a list")
        return [_read_tool(tool) for tool in listed]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        words = f"{PARAMETERS}.tools of the row: {type(error).__name__}: {error}"
        raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False) from error


def _read_tool(tool: Mapping[str, Any]) -> ToolDescription:
    if tool.get("type") != "function":
        raise ValueError(f"a tool has the type {excerpt(tool.get('type'))}; only functions are called")
    name = str(tool["name"])
    if not _TOOL_NAME.fullmatch(name) or name in RESERVED:
        raise ValueError(f"{name!r:.80} names no tool")
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    return ToolDescription(name=name, description=tool.get("description") or "", parameters=parameters)


def build_response(row: Mapping[str, Any], turns: Sequence[RecordedTurn], *, outputs: bool = True) -> Json:
    """Return a response of the Responses API with the turns of a model, and with `outputs` those of its calls.

    Thoughts at the beginning of a turn are a reasoning item, as a server of the model would make it.
    """
    items: list[Json] = []
    for turn in turns:
        thoughts, text = split_thoughts(turn.text)
        if thoughts:
            summary = [{"type": "summary_text", "text": thoughts}]
            items.append({"type": "reasoning", "id": f"rs_{len(items)}", "summary": summary})
        if text.strip() or not turn.calls:
            content = [{"type": "output_text", "text": text.strip(), "annotations": []}]
            message = {"type": "message", "id": f"msg_{len(items)}", "role": "assistant", "status": "completed"}
            items.append({**message, "content": content})
        answers = []
        for call in turn.calls:
            name = f"call_{len(items)}"
            described = {"id": f"fc_{len(items)}", "call_id": name, "name": call.name, "arguments": call.arguments}
            items.append({"type": "function_call", "status": "completed", **described})
            answers.append({"type": "function_call_output", "call_id": name, "output": call.output})
        items += answers if outputs else []
    parameters = row[PARAMETERS]
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "created_at": 0,
        "model": "policy",
        "object": "response",
        "output": items,
        "parallel_tool_calls": parameters.get("parallel_tool_calls") is not False,
        "tool_choice": parameters.get("tool_choice") or "auto",
        "tools": parameters.get("tools") or [],
    }


def _arguments_of(call: Call) -> Json:
    """Raises InvalidCall."""
    if call.arguments is None:
        raise InvalidCall(f"write the arguments of {call.name} as one JSON object")
    return dict(call.arguments)


def _record(session: NemoGymSession, call: Call, arguments: Json, output: str) -> None:
    turn = session.turns[-1]
    if not turn.calls:
        turn.text = turn.text[: call.start]
    turn.calls.append(RecordedCall(call.name, encode_json(arguments).decode(), output))


def read_rows(
    source: str, *, verify_only: Sequence[str] = (), data_source: str = "nemo_gym"
) -> Iterator[dict[str, Any]]:
    """Yield rows of a JSON Lines file of NeMo-Gym, such as ``data/example.jsonl`` of a server.

    `verify_only`: fields that only ``/verify`` needs, such as ``expected_answer``: they are sent at the end, and not
    with the whole row at the beginning. Raises ConfigError that names the line.
    """
    with Path(source).open(encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            where = f"{source}, line {index + 1}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: {error}") from None
            if not isinstance(row, dict) or not isinstance(row.get(PARAMETERS), dict):
                raise ConfigError(f"{where}: a row is an object with {PARAMETERS}")
            if missing := [name for name in verify_only if name not in row]:
                raise ConfigError(f"{where}: the row has no {', '.join(missing)}; its fields: {', '.join(row)}")
            truth = {name: row.pop(name) for name in verify_only}
            yield {
                "data_source": data_source,
                "prompt": read_prompt(row[PARAMETERS], where),
                "ability": "environment",
                "reward_model": {"style": ENVIRONMENT_STYLE, "ground_truth": truth},
                "extra_info": {
                    "index": index,
                    "need_tools_kwargs": True,
                    "tools_kwargs": {"environment": {"name": "nemo_gym", "row": row}},
                },
            }


def read_prompt(parameters: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    """Return the messages of ``responses_create_params``. Raises ConfigError that begins with `where`."""
    items = parameters.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise ConfigError(f"{where}: {PARAMETERS}.input is {excerpt(items)}; it must be a text or a list of messages")
    start = parameters.get("instructions")
    messages = [{"role": "system", "content": str(start)}] if start else []
    for i, item in enumerate(items):
        role = item.get("role") if isinstance(item, dict) else None
        if role not in ("system", "developer", "user", "assistant"):
            raise ConfigError(f"{where}: {PARAMETERS}.input[{i}] is {excerpt(item)}; only messages are read")
        text = _read_content(item.get("content"), f"{where}: {PARAMETERS}.input[{i}]")
        messages.append({"role": "system" if role == "developer" else role, "content": text})
    return messages


def _read_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{where} has content other than text: {excerpt(content)}; leave such rows out")
    return "".join(str(text) for text in texts)
