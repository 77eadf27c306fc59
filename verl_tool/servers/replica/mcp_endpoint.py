"""``POST /mcp``: the tool server as an MCP server (streamable HTTP, stateless), for any MCP client.

The official SDK speaks the protocol; what a request meets before it, and how a tool is run, is the same as for ``POST
/get_observation``: host check, key, bounds, queue, deadline, the replica that owns the trajectory, each step once.

A call's trajectory is named by the headers ``x-verl-tool-trajectory`` and ``x-verl-tool-step``, or in its ``_meta`` by
``verl-tool/trajectory`` and ``verl-tool/step``. A call that names none is a trajectory of its own.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response

from verl_tool.content.parts import ImagePart, listed, to_wire
from verl_tool.errors import ToolFault
from verl_tool.http.messages import HttpError
from verl_tool.http.web_app import Request
from verl_tool.protocol import (
    A_TRAJECTORY_ID,
    DIRECT_FIELD,
    MAX_ACTION_CHARACTERS,
    MAX_STEP,
    STEP_HEADER,
    TRAJECTORY_HEADER,
    Fault,
    FaultKind,
    StepRequest,
    StepResult,
    ToolDescription,
    is_trajectory_id,
)
from verl_tool.servers.replica.asgi_app import ToolServerApp
from verl_tool.servers.replica.wire import decoded
from verl_tool.util.deadline import Deadline
from verl_tool.util.json_text import BadJsonError, decode_request_json, encode_json, excerpt

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server
    from mcp_types import CallToolRequestParams, CallToolResult, ImageContent, ListToolsResult

PATH = "/mcp"
TRAJECTORY_META = "verl-tool/trajectory"
STEP_META = "verl-tool/step"
DONE_META = "verl-tool/done"
"""In the `_meta` of a result: the call ended its trajectory."""
REWARD_META = "verl-tool/reward"
"""In the `_meta` of a result: the tool's reward for the call."""

_MARGIN_SECONDS = 5.0
"""Beyond the time of the tool, for the SDK."""
_EXCHANGE = "verl_tool.mcp"
"""Entry of a scope: its `_Exchange`."""
_DATA_URI = re.compile(r"data:(?P<type>[a-z]+/[\w.+-]+);base64,(?P<data>[A-Za-z0-9+/=\s]*)")


class McpTools(Protocol):
    """The tools that a route serves."""

    @property
    def timeout_seconds(self) -> float:
        """Deadline of one request."""
        ...

    async def describe(self) -> Sequence[ToolDescription]:
        """The tools to list. Raises ToolFault if they are not known."""
        ...

    async def call(
        self, name: str, arguments: Mapping[str, Any], headers: Mapping[bytes, bytes], meta: Mapping[str, Any]
    ) -> StepResult:
        """Run one call; the request's headers and ``_meta`` may say whose it is. Raises HttpError, and MCPError for a
        call that cannot be one (`rejection`)."""
        ...


class _ServerTools:
    """The tools of a replica."""

    def __init__(self, app: ToolServerApp) -> None:
        self._app = app
        self.timeout_seconds = app.request_timeout_seconds

    async def describe(self) -> Sequence[ToolDescription]:
        return self._app.toolset.describe()

    async def call(
        self, name: str, arguments: Mapping[str, Any], headers: Mapping[bytes, bytes], meta: Mapping[str, Any]
    ) -> StepResult:
        tool = self._app.toolset.tool(name)
        if tool is None:
            raise unknown_tool(name, [tool.name for tool in self._app.toolset.tools])
        action = written_call(name, arguments)
        trajectory = _one_of(headers, TRAJECTORY_HEADER, meta, TRAJECTORY_META)
        step = _step_number(_one_of(headers, STEP_HEADER, meta, STEP_META))
        if trajectory is None:
            if tool.stateful or step is not None:
                why = "keeps state" if tool.stateful else "was sent with a step"
                raise rejection(
                    f"tool {name} {why}: name the trajectory by {TRAJECTORY_HEADER} or _meta {TRAJECTORY_META}"
                )
            trajectory = f"mcp-{secrets.token_hex(16)}"
        elif not is_trajectory_id(trajectory):
            raise rejection(f"the trajectory is {excerpt(trajectory)}; send {A_TRAJECTORY_ID}")
        while True:  # until the deadline of `serve`
            [result] = await self._app.answer([StepRequest(trajectory, action, step, extra={DIRECT_FIELD: True})])
            if result.fault is None or result.fault.kind is not FaultKind.QUEUED:
                return result


@dataclass
class _Exchange:
    """One request, as the SDK's handlers need it."""

    tools: McpTools
    headers: Mapping[bytes, bytes]
    refusal: HttpError | None = None
    """What to answer in place of what the SDK makes of it."""


class McpEndpoint:
    """A route. The SDK is loaded at the first request, beside the event loop."""

    def __init__(self) -> None:
        self._server: Server[Any] | None = None

    async def answer(self, app: ToolServerApp, request: Request) -> Response:
        """The answer with the tools of a replica. Raises HttpError as `serve`, and 503 if the queue is full."""
        return await self.serve(_ServerTools(app), request)

    async def serve(self, tools: McpTools, request: Request) -> Response:
        """The SDK's answer. Raises HttpError: 400 if the body is not JSON, 501 if the SDK is not installed, 504 after
        the deadline of `tools`, and what `tools` raises."""
        try:
            await decoded(decode_request_json, request.body)
        except BadJsonError as error:
            raise HttpError(400, "bad_request", str(error)) from None
        exchange, collected = _Exchange(tools, request.headers), _Collected(request.body)
        try:
            with Deadline(tools.timeout_seconds + _MARGIN_SECONDS):
                await self._exchange(_scope(request, exchange), collected)
        except asyncio.TimeoutError:
            message = f"no answer within {tools.timeout_seconds:g} s"
            raise HttpError(504, FaultKind.TIMEOUT.value, message) from None
        if exchange.refusal is not None:
            raise exchange.refusal
        return collected.response()

    async def _exchange(self, scope: dict[str, Any], collected: _Collected) -> None:
        if self._server is None:
            try:
                self._server = await asyncio.to_thread(_new_server)
            except ImportError as error:
                words = f"this server cannot speak MCP ({error}); install the extra mcp: pip install 'verl-tool[mcp]'"
                raise HttpError(501, "mcp_missing", words) from None
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        # One for each request: stateless, it keeps nothing from one to the next, and nothing of it outlives its task.
        manager = StreamableHTTPSessionManager(self._server, json_response=True, stateless=True)
        async with manager.run():
            await manager.handle_request(scope, collected.receive, collected.send)


class _Collected:
    """A request's body for the SDK, and the answer that it sends."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 500
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []

    async def receive(self) -> dict[str, Any]:
        if self._body is None:
            # Whoever serves the request cancels its work when the client leaves.
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            self._parts.append(message.get("body", b""))

    def response(self) -> Response:
        return Response(b"".join(self._parts), self._status, self._headers)


def _scope(request: Request, exchange: _Exchange) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "root_path": "",
        "query_string": b"",
        "headers": list(request.headers.items()),
        _EXCHANGE: exchange,
    }


def _new_server() -> Server[Any]:
    """Raises ImportError if the SDK is not installed."""
    import mcp.server.streamable_http_manager  # noqa: F401  # what requests need, loaded with the rest
    from mcp.server.lowlevel import Server

    return Server(
        "verl-tool",
        instructions=(
            f"Name the trajectory of your calls by the header {TRAJECTORY_HEADER} or by {TRAJECTORY_META} in _meta, "
            f"and number its steps from 0 by {STEP_HEADER} or {STEP_META}: a repeated step runs once."
        ),
        # No tool has arguments that are mirrored into headers, for which alone the SDK wants the schema.
        get_tool_input_schema=lambda name: None,
        on_list_tools=_list_tools,
        on_call_tool=_call_tool,
    )


async def _list_tools(context: Any, params: Any) -> ListToolsResult:
    from mcp_types import ListToolsResult, Tool

    try:
        described = await _exchange_of(context).tools.describe()
    except ToolFault as error:
        raise _fault_error(error.as_fault()) from None
    tools = [Tool(name=tool.name, description=tool.description, input_schema=tool.parameters) for tool in described]
    return ListToolsResult(tools=tools)


async def _call_tool(context: Any, params: CallToolRequestParams) -> CallToolResult:
    exchange = _exchange_of(context)
    try:
        result = await exchange.tools.call(params.name, params.arguments or {}, exchange.headers, context.meta or {})
    except HttpError as error:
        exchange.refusal = error
        raise rejection(error.message) from None
    return _describe(params.name, result)


def _exchange_of(context: Any) -> _Exchange:
    exchange: _Exchange = context.request.scope[_EXCHANGE]
    return exchange


def written_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The call as an action (`DIRECT_FIELD`). Raises MCPError if it is too long."""
    action = encode_json({"name": name, "arguments": arguments}).decode()
    if len(action) > MAX_ACTION_CHARACTERS:
        raise rejection(f"the call has {len(action)} characters; at most {MAX_ACTION_CHARACTERS} are taken")
    return action


def _one_of(headers: Mapping[bytes, bytes], header: str, meta: Mapping[str, Any], key: str) -> Any:
    """What a header or an entry of ``_meta`` says; None if neither is there. Raises MCPError if they differ."""
    raw, reported = headers.get(header.encode()), meta.get(key)
    if raw is None:
        return reported
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise rejection(f"the header {header} is not UTF-8") from None
    if reported is not None and str(reported) != text:
        raise rejection(
            f"the header {header} says {excerpt(text)} and _meta {key} {excerpt(reported)}; send one of them"
        )
    return text


def _step_number(value: Any) -> int | None:
    """Raises MCPError if it is no number of a step."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(MAX_STEP)):
        value = int(value)
    if value is None or (type(value) is int and 0 <= value <= MAX_STEP):
        return value
    raise rejection(f"the step is {excerpt(value)}; send a whole number from 0 to {MAX_STEP}")


def _describe(name: str, result: StepResult) -> CallToolResult:
    """Raises MCPError for a fault, which is no answer of the tool; its data say whether the step may be sent again."""
    from mcp_types import INTERNAL_ERROR, CallToolResult, TextContent

    if result.fault is not None:
        raise _fault_error(result.fault)
    if result.audio is not None:
        raise _error(INTERNAL_ERROR, f"tool {name} answers with audio, which is not carried to MCP clients")
    meta = {REWARD_META: result.reward, DONE_META: result.done or None}
    return CallToolResult(
        content=[TextContent(text=result.observation), *_images(name, result.image)],
        is_error=not result.valid or bool((result.metrics or {}).get("error")),
        _meta={key: value for key, value in meta.items() if value is not None} or None,
    )


def _images(name: str, image: object) -> Sequence[ImageContent]:
    """Raises MCPError if one is no part and no data URI."""
    from mcp_types import INTERNAL_ERROR, ImageContent

    images = []
    for each in listed(image):
        uri = to_wire(each) if isinstance(each, ImagePart) else each
        match = _DATA_URI.fullmatch(uri) if isinstance(uri, str) else None
        if match is None:
            words = f"tool {name} answers with an image that is not a data URI (data:image/png;base64,…)"
            raise _error(INTERNAL_ERROR, f"{words} and cannot be carried")
        images.append(ImageContent(data=match["data"], mime_type=match["type"]))
    return images


def unknown_tool(name: str, known: Sequence[str]) -> Exception:
    """An MCPError that names the tools that there are."""
    return rejection(f"tool {excerpt(name)} is unknown; known: {', '.join(known)}")


def rejection(message: str) -> Exception:
    """An MCPError: the call is wrong, and was not run."""
    from mcp_types import INVALID_PARAMS

    return _error(INVALID_PARAMS, message)


def _fault_error(fault: Fault) -> Exception:
    from mcp_types import INTERNAL_ERROR, INVALID_PARAMS

    wrong = fault.kind is FaultKind.BAD_REQUEST
    return _error(INVALID_PARAMS if wrong else INTERNAL_ERROR, fault.message, fault.model_dump(mode="json"))


def _error(code: int, message: str, data: object = None) -> Exception:
    from mcp import MCPError

    return MCPError(code, message, data)
