"""``POST /mcp``: serve the tools to MCP clients (streamable HTTP, stateless).

The official SDK implements the protocol. Host check, API key, limits, queue, deadline, routing to the trajectory's
replica, and running each step once work as for ``POST /get_observation``.

A call names its trajectory and step by the headers ``x-verl-tool-trajectory`` and ``x-verl-tool-step``, or by
``verl-tool/trajectory`` and ``verl-tool/step`` in its ``_meta``. A call without them is a trajectory of its own.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from verl_tool.content.parts import ImagePart, listed, to_wire
from verl_tool.http.messages import HttpError
from verl_tool.http.web_app import Request
from verl_tool.protocol import (
    A_TRAJECTORY_ID,
    DIRECT_FIELD,
    MAX_ACTION_CHARACTERS,
    MAX_STEP,
    STEP_HEADER,
    TRAJECTORY_HEADER,
    FaultKind,
    StepRequest,
    StepResult,
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
"""Time for the SDK, in addition to that of the tool."""
_EXCHANGE = "verl_tool.mcp"
"""Key of the `_Exchange` in an ASGI scope."""
_DATA_URI = re.compile(r"data:(?P<type>[a-z]+/[\w.+-]+);base64,(?P<data>[A-Za-z0-9+/=\s]*)")


@dataclass
class _Exchange:
    """What the SDK's handlers need of one request."""

    app: ToolServerApp
    headers: Mapping[bytes, bytes]
    refusal: HttpError | None = None
    """Replaces the SDK's answer."""


class McpEndpoint:
    """The route of one app. The SDK is imported in a thread, at the first request."""

    def __init__(self) -> None:
        self._server: Server[Any] | None = None

    async def answer(self, app: ToolServerApp, request: Request) -> Response:
        """Return the SDK's answer.

        Raises HttpError: 400 if the body is not JSON, 501 if the SDK is not installed, 503 if the queue is full, 504
        after the app's deadline.
        """
        try:
            await decoded(decode_request_json, request.body)
        except BadJsonError as error:
            raise HttpError(400, "bad_request", str(error)) from None
        exchange, collected = _Exchange(app, request.headers), _Collected(request.body)
        try:
            with Deadline(app.request_timeout_seconds + _MARGIN_SECONDS):
                await self._exchange(_scope(request, exchange), collected)
        except asyncio.TimeoutError:
            message = f"no answer within {app.request_timeout_seconds:g} s"
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

        # One for each request: a stateless manager stores nothing, and its tasks end with the request.
        manager = StreamableHTTPSessionManager(self._server, json_response=True, stateless=True)
        async with manager.run():
            await manager.handle_request(scope, collected.receive, collected.send)


class _Collected:
    """Feeds the body of a request to the SDK, and collects the SDK's answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 500
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []

    async def receive(self) -> dict[str, Any]:
        if self._body is None:
            # The HTTP server cancels this when the client disconnects.
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
    import mcp.server.streamable_http_manager  # noqa: F401  # needed by requests: load it in this thread too
    from mcp.server.lowlevel import Server

    return Server(
        "verl-tool",
        instructions=(
            f"Name the trajectory of your calls by the header {TRAJECTORY_HEADER} or by {TRAJECTORY_META} in _meta, "
            f"and number its steps from 0 by {STEP_HEADER} or {STEP_META}: a repeated step runs once."
        ),
        # The SDK needs the schema only for arguments that are mirrored into headers, and no tool has any.
        get_tool_input_schema=lambda name: None,
        on_list_tools=_list_tools,
        on_call_tool=_call_tool,
    )


async def _list_tools(context: Any, params: Any) -> ListToolsResult:
    from mcp_types import ListToolsResult, Tool

    tools = [
        Tool(name=tool.name, description=tool.description, input_schema=tool.parameters)
        for tool in _exchange_of(context).app.toolset.describe()
    ]
    return ListToolsResult(tools=tools)


async def _call_tool(context: Any, params: CallToolRequestParams) -> CallToolResult:
    exchange = _exchange_of(context)
    step = _step_request(exchange, context.meta or {}, params.name, params.arguments or {})
    try:
        [result] = await exchange.app.answer([step])
    except HttpError as error:
        exchange.refusal = error
        raise _rejection(error.message) from None
    return _describe(params.name, result)


def _exchange_of(context: Any) -> _Exchange:
    exchange: _Exchange = context.request.scope[_EXCHANGE]
    return exchange


def _step_request(exchange: _Exchange, meta: Mapping[str, Any], name: str, arguments: Mapping[str, Any]) -> StepRequest:
    """Convert a call to a step of its trajectory. Raises MCPError that names the wrong value."""
    tool = exchange.app.toolset.tool(name)
    if tool is None:
        known = ", ".join(tool.name for tool in exchange.app.toolset.tools)
        raise _rejection(f"tool {excerpt(name)} is unknown; known: {known}")
    action = encode_json({"name": name, "arguments": arguments}).decode()
    if len(action) > MAX_ACTION_CHARACTERS:
        raise _rejection(f"the call has {len(action)} characters; at most {MAX_ACTION_CHARACTERS} are accepted")
    trajectory = _one_of(exchange.headers, TRAJECTORY_HEADER, meta, TRAJECTORY_META)
    step = _step_number(_one_of(exchange.headers, STEP_HEADER, meta, STEP_META))
    if trajectory is None:
        if tool.stateful or step is not None:
            why = "keeps state" if tool.stateful else "was sent with a step"
            raise _rejection(
                f"tool {name} {why}: name the trajectory by {TRAJECTORY_HEADER} or _meta {TRAJECTORY_META}"
            )
        trajectory = f"mcp-{secrets.token_hex(16)}"
    elif not is_trajectory_id(trajectory):
        raise _rejection(f"the trajectory is {excerpt(trajectory)}; send {A_TRAJECTORY_ID}")
    return StepRequest(trajectory, action, step, extra={DIRECT_FIELD: True})


def _one_of(headers: Mapping[bytes, bytes], header: str, meta: Mapping[str, Any], key: str) -> Any:
    """Return the value of a header or of a key in ``_meta``, None without both. Raises MCPError if they differ."""
    raw, in_meta = headers.get(header.encode()), meta.get(key)
    if raw is None:
        return in_meta
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise _rejection(f"the header {header} is not UTF-8") from None
    if in_meta is not None and str(in_meta) != text:
        raise _rejection(f"the header {header} is {excerpt(text)} and _meta {key} {excerpt(in_meta)}; send one of them")
    return text


def _step_number(value: Any) -> int | None:
    """Parse the number of a step. Raises MCPError if it is not a number, or out of range."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(MAX_STEP)):
        value = int(value)
    if value is None or (type(value) is int and 0 <= value <= MAX_STEP):
        return value
    raise _rejection(f"the step is {excerpt(value)}; send a whole number from 0 to {MAX_STEP}")


def _describe(name: str, result: StepResult) -> CallToolResult:
    """Convert a result. Raises MCPError for a fault; its data say whether the step may be sent again."""
    from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, CallToolResult, TextContent

    if result.fault is not None:
        fault = result.fault
        wrong = fault.kind is FaultKind.BAD_REQUEST
        raise _error(INVALID_PARAMS if wrong else INTERNAL_ERROR, fault.message, fault.model_dump(mode="json"))
    if result.audio is not None:
        raise _error(INTERNAL_ERROR, f"tool {name} answers with audio, which is not sent to MCP clients")
    meta = {REWARD_META: result.reward, DONE_META: result.done or None}
    return CallToolResult(
        content=[TextContent(text=result.observation), *_images(name, result.image)],
        is_error=not result.valid or bool((result.metrics or {}).get("error")),
        _meta={key: value for key, value in meta.items() if value is not None} or None,
    )


def _images(name: str, image: object) -> Sequence[ImageContent]:
    """Convert images. Raises MCPError if one is neither an `ImagePart` nor a data URI."""
    from mcp_types import INTERNAL_ERROR, ImageContent

    images = []
    for each in listed(image):
        uri = to_wire(each) if isinstance(each, ImagePart) else each
        match = _DATA_URI.fullmatch(uri) if isinstance(uri, str) else None
        if match is None:
            words = f"tool {name} answers with an image that is not a data URI (data:image/png;base64,…)"
            raise _error(INTERNAL_ERROR, f"{words} and cannot be sent")
        images.append(ImageContent(data=match["data"], mime_type=match["type"]))
    return images


def _rejection(message: str) -> Exception:
    from mcp_types import INVALID_PARAMS

    return _error(INVALID_PARAMS, message)


def _error(code: int, message: str, data: object = None) -> Exception:
    from mcp import MCPError

    return MCPError(code, message, data)
