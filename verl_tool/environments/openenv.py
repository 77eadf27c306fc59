"""Environments of an OpenEnv server (https://github.com/huggingface/OpenEnv), over its route ``/ws``.

One WebSocket is one environment: it is opened by `begin`, which sends ``reset`` with the row's arguments, and closed by
`end`. What an action is follows from ``GET /schema``:

- one text field: each turn of the model is the action (`Opening.every_turn`), and the observation is a user's message
- several fields: a tool with this schema
- an environment with MCP tools: its ``list_tools`` after the reset, and ``call_tool`` for each call
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic import Field, SecretStr

from verl_tool.client.exchange import TooLongError, read_bounded
from verl_tool.environments.environment_tool import Environment
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.formats import Call
from verl_tool.formats.scan import remove_thoughts
from verl_tool.protocol import FaultKind, Opening, Role, ToolDescription
from verl_tool.servers.tools._service import base_url, key_headers
from verl_tool.servers.tools.base import InvalidCall, ToolOptions, ToolResult
from verl_tool.util.json_text import decode_json, encode_json, excerpt
from verl_tool.verification import ENVIRONMENT_STYLE

ACTION_TOOL = "act"
"""Name of the tool of an environment whose action has several fields."""
CLOSE_SECONDS = 2.0
PING_SECONDS = 60.0
"""How often the client pings. A server that does not answer within half of it is lost."""
MAX_UNREAD = 2
"""Answers of one connection that wait to be read: one, and the end of the connection."""
MAX_TOOLS = 128
_TOO_BIG = 1009
"""Code with which a side closes that was sent a message above its limit (RFC 6455, 7.4.1)."""


class OpenEnvOptions(ToolOptions):
    """Where the server is, and limits of one episode."""

    url: str = "http://127.0.0.1:8000"
    """Base address, such as ``http://127.0.0.1:8000``."""
    api_key: SecretStr | None = None
    """Bearer token, if the server wants one."""
    connect_seconds: float = Field(default=10.0, gt=0)
    reset_seconds: float = Field(default=120.0, gt=0)
    """For ``/schema``, and the answers to ``reset`` and ``list_tools``."""
    step_seconds: float = Field(default=60.0, gt=0)
    """For the answer to an action. A later one is the fault ``timeout``."""
    max_message_bytes: int = Field(default=4 << 20, ge=1 << 10)
    """Size of one message of the server."""
    max_episodes: int | None = Field(default=None, ge=1)
    """Episodes at once of each replica. A further one is the fault ``overloaded``, which is retried, as it is if the
    server itself is full."""
    action_field: str | None = None
    """The text field that a turn is sent in, if the action has several."""
    action_tag: str | None = Field(default=None, pattern=r"^\w+$")
    """``action``: what is sent is the content of the last ``<action>…</action>`` of a turn, without its white space."""
    observation_field: str | None = None
    """The one field of observations that the model reads; all of them if None."""


@dataclass(frozen=True)
class ActionForm:
    """What an environment takes as an action. Without a field and a tool, it has MCP tools."""

    field: str | None = None
    """Each turn is the value of this field."""
    tool: ToolDescription | None = None
    """A tool whose arguments are the action."""


@dataclass
class OpenEnvEpisode:
    """One environment on the server."""

    socket: EnvironmentSocket
    form: ActionForm


class OpenEnvEnvironment(Environment):
    """A client of one server."""

    name = "openenv"
    description = "An environment of an OpenEnv server."
    Options = OpenEnvOptions
    options: OpenEnvOptions

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._url = base_url(self.name, self.options.url)
        self.max_live = self.options.max_episodes  # type: ignore[misc]
        key = self.options.api_key
        self._headers = key_headers(self.name, None if key is None else key.get_secret_value())
        self._http: aiohttp.ClientSession | None = None
        self._form: ActionForm | None = None
        self._reading = asyncio.Lock()

    async def check_needs(self) -> None:
        try:
            await self._read_form()
        finally:
            await self.close()

    async def close(self) -> None:
        if self._http is not None:
            http, self._http = self._http, None
            await http.close()

    async def begin(self, trajectory_id: str, arguments: Mapping[str, Any]) -> tuple[OpenEnvEpisode, Opening]:
        async with self._reading:
            form = self._form = self._form or await self._read_form()
        socket = await self._connect()
        try:
            seconds = self.options.reset_seconds
            first = _read_reset(await socket.request({"type": "reset", "data": dict(arguments)}, seconds))
            tools = [form.tool] if form.tool is not None else []
            if form == ActionForm():
                tools = _read_tools(_read_reset(await socket.request(_step({"type": "list_tools"}), seconds)))
        except ToolFault as fault:
            self._form = None  # another program may answer there by now
            await socket.close()
            if fault.kind is FaultKind.STATE_LOST:
                raise ToolFault(FaultKind.UNREACHABLE, fault.message, retryable=True) from fault
            raise
        except BaseException:
            await socket.close()
            raise
        text = describe_observation(first.get("observation"), self.options.observation_field)
        messages = [{"role": "user", "content": text}] if text else []
        opening = Opening(messages=messages, tools=tools, every_turn=form.field is not None)
        return OpenEnvEpisode(socket, form), opening

    async def step(self, session: OpenEnvEpisode, call: Call) -> ToolResult:
        form = session.form
        role: Role = "tool" if form.field is None else "user"
        try:
            action = self._action_of(form, call)
        except InvalidCall as error:
            return ToolResult(str(error), valid=False, invalid_reason=str(error), role=role)
        answer = await session.socket.request(_step(action), self.options.step_seconds)
        if answer.get("type") == "error":
            return _mistake(answer, role)
        data = _observed(answer)
        text, valid, failed = self._describe(form, data.get("observation"))
        reward = data.get("reward")
        return ToolResult(
            text,
            valid=valid,
            error=failed,
            done=data.get("done") is True,
            reward=float(reward) if isinstance(reward, int | float) else None,
            role=role,
        )

    async def end(self, session: OpenEnvEpisode) -> None:
        await session.socket.close()

    def _action_of(self, form: ActionForm, call: Call) -> dict[str, Any]:
        """Return the action that a call or a turn is. Raises InvalidCall."""
        if form.field is not None:
            return {form.field: self._text_of(call)}
        if call.arguments is None:
            raise InvalidCall(f"write the arguments of {call.name} as one JSON object")
        if form.tool is not None:
            return dict(call.arguments)
        return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}

    def _text_of(self, call: Call) -> str:
        """Return what a turn says, without its thoughts. Raises InvalidCall."""
        text = remove_thoughts(call.input).strip()
        tag = self.options.action_tag
        if tag is None:
            return text
        start, end = text.rfind(f"<{tag}>"), text.rfind(f"</{tag}>")
        if start < 0 or end < start:
            raise InvalidCall(f"write your action between <{tag}> and </{tag}>")
        return text[start + len(tag) + 2 : end].strip()

    def _describe(self, form: ActionForm, observation: object) -> tuple[str, bool, bool]:
        """Return the text of an observation, whether the call was valid, and whether it failed."""
        if form == ActionForm() and isinstance(observation, Mapping) and {"result", "error"} <= observation.keys():
            return _describe_call(observation["result"], observation["error"])
        return describe_observation(observation, self.options.observation_field), True, False

    async def _read_form(self) -> ActionForm:
        """Read what an action is. Raises ToolFault."""
        seconds = self.options.reset_seconds
        try:
            async with self._open().get(
                f"{self._url}/schema",
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=self.options.connect_seconds),
                allow_redirects=False,
            ) as response:
                body, status = await read_bounded(response, self.options.max_message_bytes), response.status
        except asyncio.TimeoutError as error:
            words = f"no answer from {self._url}/schema within {seconds:g} s (reset_seconds)"
            raise ToolFault(FaultKind.UNREACHABLE, words, retryable=True) from error
        except TooLongError as error:
            raise _no_openenv(f"{self._url}/schema is longer than max_message_bytes") from error
        except (aiohttp.ClientError, OSError) as error:
            words = f"no answer from {self._url}/schema: {str(error) or type(error).__name__}; is the server running?"
            raise ToolFault(FaultKind.UNREACHABLE, words, retryable=True) from error
        if status != 200:
            raise _no_openenv(f"{self._url}/schema answered HTTP {status}; set the options url and api_key")
        try:
            action = decode_json(body)["action"]
        except (ValueError, KeyError, TypeError) as error:
            raise _no_openenv(f"{self._url}/schema holds no schema of an action: {excerpt(body.decode())}") from error
        return read_action_form(action, self.options.action_field)

    async def _connect(self) -> EnvironmentSocket:
        """Open a connection, which is one environment. Raises ToolFault."""
        seconds = self.options.connect_seconds
        try:
            opened = await asyncio.wait_for(
                self._open().ws_connect(
                    f"{self._url}/ws",
                    headers=self._headers,
                    max_msg_size=self.options.max_message_bytes,
                    heartbeat=PING_SECONDS,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_SECONDS),
                ),
                seconds,
            )
        except asyncio.TimeoutError as error:
            words = f"no connection to {self._url}/ws within {seconds:g} s (connect_seconds)"
            raise ToolFault(FaultKind.UNREACHABLE, words, retryable=True) from error
        except aiohttp.WSServerHandshakeError as error:
            words = f"{self._url}/ws answered HTTP {error.status}; set the options url and api_key"
            busy = error.status in (429, 503)
            kind = FaultKind.OVERLOADED if busy else FaultKind.MISCONFIGURED
            raise ToolFault(kind, words, retryable=busy) from error
        except (aiohttp.ClientError, OSError) as error:
            words = f"no connection to {self._url}/ws: {str(error) or type(error).__name__}"
            raise ToolFault(FaultKind.UNREACHABLE, words, retryable=True) from error
        return EnvironmentSocket(opened, f"{self._url}/ws", self.options.max_message_bytes)

    def _open(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._http


class EnvironmentSocket:
    """One connection: one answer follows each message.

    It is read all the time, since a ping that nobody reads is not answered, and a server closes such a connection: a
    model may write for longer than servers wait.
    """

    def __init__(self, opened: aiohttp.ClientWebSocketResponse, address: str, max_message_bytes: int) -> None:
        self._opened, self._address, self._max_message_bytes = opened, address, max_message_bytes
        self._answers: asyncio.Queue[str | None] = asyncio.Queue(MAX_UNREAD)
        self._fault: ToolFault | None = None
        self._reader = asyncio.create_task(self._read())

    async def request(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a message and return its answer, within `seconds`. Raises ToolFault: the environment is lost then."""
        if self._fault is not None:
            raise self._fault
        try:
            text = await asyncio.wait_for(self._exchange(encode_json(message).decode()), seconds)
        except asyncio.TimeoutError as error:
            words = f"{self._address}: no answer to {message['type']} within {seconds:g} s"
            self._fault = self._lost("a request before had no answer in time")
            raise ToolFault(FaultKind.TIMEOUT, words, retryable=False) from error
        except ToolFault as fault:
            self._fault = fault
            raise
        try:
            answer = decode_json(text.encode())
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise _no_openenv(f"{self._address} answered {excerpt(text)}")
        return answer

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.wait([self._reader])
        with contextlib.suppress(asyncio.TimeoutError, aiohttp.ClientError, OSError):
            await asyncio.wait_for(self._opened.close(), CLOSE_SECONDS)

    async def _exchange(self, text: str) -> str:
        if not self._answers.empty() and not self._opened.closed:
            raise self._lost("it sent an answer that nothing was sent for")
        # A server that is full says so, and closes the connection.
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._opened.send_str(text)
        answer = await self._answers.get()
        if answer is None:
            raise self._ended()
        return answer

    async def _read(self) -> None:
        while True:
            message = await self._opened.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                await self._answers.put(None)
                return
            await self._answers.put(message.data)

    def _ended(self) -> ToolFault:
        code = self._opened.close_code
        if code == _TOO_BIG:
            words = f"a message is above a limit (max_message_bytes is {self._max_message_bytes})"
            return ToolFault(FaultKind.TOOL_CRASHED, f"{self._address}: {words}", retryable=False)
        return self._lost(f"it closed the connection with code {code}")

    def _lost(self, words: str) -> ToolFault:
        return ToolFault(FaultKind.STATE_LOST, f"{self._address}: {words}", retryable=False)


def read_action_form(schema: Mapping[str, Any], field: str | None = None) -> ActionForm:
    """Return what an action is, by its JSON schema; `field` is the text field to take. Raises ToolFault."""
    properties = dict(schema.get("properties") or {})
    properties.pop("metadata", None)  # each action has it
    if field is not None:
        if field not in properties:
            known = ", ".join(properties) or "none"
            words = f"action_field is {field!r}; fields of the environment's action: {known}"
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        return ActionForm(field=field)
    if not properties or {"tool_name", "arguments"} <= properties.keys():
        return ActionForm()
    if len(properties) == 1:
        [(name, described)] = properties.items()
        kinds = [described, *(described.get("anyOf") or ())] if isinstance(described, Mapping) else []
        if any(isinstance(kind, Mapping) and kind.get("type") == "string" for kind in kinds):
            return ActionForm(field=name)
    required = [name for name in schema.get("required") or () if name in properties]
    parameters = {**schema, "type": "object", "properties": properties, "required": required}
    description = str(schema.get("description") or "Plays one action in the environment.")
    return ActionForm(tool=ToolDescription(name=ACTION_TOOL, description=description, parameters=parameters))


def describe_observation(observation: object, field: str | None = None) -> str:
    """Return what a model reads of an observation: its only text, or all its fields as JSON. ``metadata`` counts only
    if there is nothing else."""
    if not isinstance(observation, Mapping):
        return "" if observation is None else _as_text(observation)
    if field is not None:
        return _as_text(observation.get(field, ""))
    fields = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    metadata = fields.pop("metadata", None)
    if not fields:
        return "" if metadata is None else describe_observation({"": metadata})
    [first, *others] = fields.values()
    if not others and isinstance(first, Mapping):
        return describe_observation(first)
    return _as_text(fields if others else first)


def read_rows(
    source: str,
    *,
    count: int = 100,
    first_seed: int = 0,
    system: str | None = None,
    user: str | None = None,
    api_key: str | None = None,
    seconds: float = 10.0,
    **arguments: Any,
) -> Iterator[dict[str, Any]]:
    """Yield rows of the server at `source`: one a seed, with the `arguments` of its ``reset``.

    `system` is the system message, the server's own description if None; `user` a user message, which a server needs
    whose observation after ``reset`` has no text. Raises ConfigError if no OpenEnv server answers there.
    """
    url = base_url("openenv", source)
    form = _get_json(f"{url}/schema", api_key, seconds)
    if not isinstance(form.get("action"), Mapping):
        raise ConfigError(f"{url}/schema holds no schema of an action; is it an OpenEnv server?")
    if system is None:
        system = str(_get_json(f"{url}/metadata", api_key, seconds).get("description") or "Play the game.")
    prompt = [{"role": "system", "content": system}]
    prompt += [] if user is None else [{"role": "user", "content": user}]
    for index in range(count):
        environment = {"name": "openenv", "seed": first_seed + index, **arguments}
        yield {
            "data_source": "openenv",
            "prompt": prompt,
            "ability": "environment",
            "reward_model": {"style": ENVIRONMENT_STYLE, "ground_truth": {}},
            "extra_info": {"index": index, "need_tools_kwargs": True, "tools_kwargs": {"environment": environment}},
        }


def _get_json(url: str, api_key: str | None, seconds: float) -> dict[str, Any]:
    """Raises ConfigError."""
    request = urllib.request.Request(url, headers=key_headers("openenv", api_key))
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=seconds) as response:
            value = json.loads(response.read(4 << 20))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{url}: {error}; start the server, or give its base address") from error
    return value if isinstance(value, dict) else {}


def _step(action: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "step", "data": dict(action)}


def _observed(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises ToolFault if it is no observation."""
    if answer.get("type") != "observation":
        raise _no_openenv(f"the answer is {excerpt(answer.get('type'))} and no observation")
    return answer["data"]


def _read_reset(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the observation of an environment that begins. Raises ToolFault."""
    if answer.get("type") != "error":
        data = _observed(answer)
        if data.get("done") is True:
            raise ToolFault(FaultKind.MISCONFIGURED, "the episode is done before it began", retryable=False)
        return data
    code, words = _read_error(answer)
    busy = code == "CAPACITY_REACHED"
    kind = FaultKind.OVERLOADED if busy else FaultKind.MISCONFIGURED
    raise ToolFault(kind, f"the environment cannot begin: {code}: {words}", retryable=busy)


def _mistake(answer: Mapping[str, Any], role: Role) -> ToolResult:
    """Return what the model reads of an error that its action may have caused. Raises ToolFault for another error."""
    code, words = _read_error(answer)
    if code == "VALIDATION_ERROR":
        return ToolResult(words, valid=False, invalid_reason=words, role=role)
    if code == "EXECUTION_ERROR":
        return ToolResult(words, error=True, role=role)
    raise _no_openenv(f"the environment answered {code}: {words}")


def _read_error(answer: Mapping[str, Any]) -> tuple[str, str]:
    """Return code and message of an error; in place of the message, what is wrong with each field."""
    data = answer["data"]
    problems = data.get("errors")
    words = str(data.get("message") or "error")
    if isinstance(problems, list) and all(isinstance(each, Mapping) for each in problems):
        wrong = (
            f"{'.'.join(str(part) for part in each.get('loc') or ()) or 'the action'}: {each.get('msg')}"
            for each in problems[:20]
        )
        words = f"{words}: {'; '.join(wrong)}"
    return str(data.get("code")), words


def _read_tools(data: Mapping[str, Any]) -> list[ToolDescription]:
    """Return the tools of the answer to ``list_tools``. Raises ToolFault."""
    listed = (data.get("observation") or {}).get("tools")
    if not isinstance(listed, list) or not listed or len(listed) > MAX_TOOLS:
        raise _no_openenv(f"list_tools answered {excerpt(listed)}; 1 to {MAX_TOOLS} tools are taken")
    try:
        return [
            ToolDescription(
                name=each["name"],
                description=each.get("description") or "",
                parameters=each.get("input_schema") or {"type": "object", "properties": {}},
            )
            for each in listed
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _no_openenv(f"list_tools answered {excerpt(listed[0])} for a tool") from error


def _describe_call(result: object, error: object) -> tuple[str, bool, bool]:
    """Return the text of a tool's result, whether the call was valid, and whether it failed."""
    if isinstance(error, Mapping):
        invalid = error.get("error_type") in ("invalid_args", "tool_not_found")
        return str(error.get("message") or "error"), not invalid, not invalid
    content = result.get("content") if isinstance(result, Mapping) else None
    if not isinstance(result, Mapping) or not isinstance(content, list):
        return describe_observation(result), True, False
    texts = [str(part["text"]) if isinstance(part, Mapping) and "text" in part else "[no text]" for part in content]
    return "\n".join(texts), True, result.get("is_error") is True


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else encode_json(value).decode()


def _no_openenv(words: str) -> ToolFault:
    return ToolFault(FaultKind.MISCONFIGURED, f"no answer of an OpenEnv environment: {words}", retryable=False)
