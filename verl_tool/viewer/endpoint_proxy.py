"""The way of the live page to a model and its tools: one eval endpoint, which the browser itself never speaks to.

The endpoint's address is given when the viewer starts, and its API key by the environment; neither can be changed by a
request, and the key is told to nobody but the endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from verl_tool.errors import ConfigError
from verl_tool.http.event_stream import HEARTBEAT, EventStream
from verl_tool.http.messages import (
    JSON,
    RETRY_AFTER,
    Disconnected,
    HeaderMap,
    HttpError,
    JsonResponse,
    error_response,
    headers_of,
)
from verl_tool.http.request_body import RequestBodies
from verl_tool.util.deadline import Deadline
from verl_tool.util.json_text import excerpt

KEY_VARIABLE = "VERL_TOOL_EVAL_API_KEY"
"""Environment variable with the endpoint's API key; the endpoint itself reads the same one."""
MAX_BODY_BYTES = 1 << 20
MAX_STREAMS = 4
"""Answers at a time, of all pages together."""
STREAM_SECONDS = 1800.0
UNREAD_SECONDS = 2.0
"""So much later an answer is given up that is not read: till then its reader can be told of the deadline."""
MAX_STREAM_BYTES = 256 << 20
"""Of one answer, with its images."""
SILENT_SECONDS = 120.0
"""An endpoint that sends nothing for so long is given up. The eval endpoint sends a comment every 15 s."""
CONNECT_SECONDS = 5.0
MODELS_SECONDS = 10.0
MAX_ERROR_BYTES = 64 << 10
MAX_MODELS_BYTES = 1 << 20

_NOT_READ = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What JSON raises that is none, is not what is looked for, or is nested too deeply."""
_OWNER = "verl-tool"
"""``owned_by`` of a model whose endpoint gives trajectories."""
_Order = TypeVar("_Order", bound=msgspec.Struct)
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation, of text."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatOrder(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a page asks for, and all that is passed on."""

    model: Annotated[str, msgspec.Meta(max_length=256)]
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=1024)]
    return_trajectory: bool = False
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    max_tokens: _Count | None = None
    max_turns: _Count | None = None


class EndpointError(HttpError):
    """The endpoint cannot be reached, or refuses."""

    def __init__(self, message: str) -> None:
        super().__init__(502, "endpoint", message)


class EndpointProxy:
    """Passes conversations on to the endpoint at `url` (``http://127.0.0.1:8000/v1``); None: there is none.

    `stream_seconds` is the deadline of one answer. Raises ConfigError if `url` is no address, or `api_key` no key.
    """

    def __init__(
        self, url: str | None = None, api_key: str | None = None, *, stream_seconds: float = STREAM_SECONDS
    ) -> None:
        self._url = None if url is None else _address(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ConfigError(f"{KEY_VARIABLE} has blanks, line ends or other characters that no key has; set it anew")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._bodies = RequestBodies(MAX_BODY_BYTES)
        self._stream_seconds = stream_seconds
        self.streams = 0

    def routes(self) -> list[Route]:
        return [Route("/api/endpoint", self._endpoint), Route("/api/chat", self._chat, methods=["POST"])]

    async def _endpoint(self, request: Request) -> Response:
        """The endpoint's address, its models (name, and whether it gives trajectories), and why it tells none."""
        state: dict[str, Any] = {"url": self._url, "models": [], "error": None}
        if self._url is not None:
            try:
                state["models"] = await self._models()
            except EndpointError as error:
                state["error"] = str(error)
        return JsonResponse(state)

    async def _models(self) -> list[dict[str, Any]]:
        """Raises EndpointError."""
        async with self._request("GET", "models", MODELS_SECONDS) as response:
            body = await _bounded(response, MAX_MODELS_BYTES)
        try:
            cards = msgspec.json.decode(body, type=_Models).data
        except _NOT_READ:
            raise EndpointError(f"what {self._url}/models says is no list of models; is it an OpenAI API?") from None
        return [{"name": card.id, "trajectories": card.owned_by == _OWNER} for card in cards]

    async def _chat(self, request: Request) -> Response:
        """An answer as a stream of events, those of the endpoint; what fails is told in an event of its own."""
        try:
            reject_other_pages(headers_of(request.scope))
            if self._url is None:
                raise HttpError(404, "no_endpoint", "this viewer has no endpoint; start it with --endpoint URL")
            order = await read_order(request, self._bodies, ChatOrder, "is no conversation")
            self._reject_more()
        except HttpError as error:
            return error_response(error)
        # The answer begins before the endpoint has said a word, so that a page that leaves stops it from then on.
        return TimedStream(self._events(order), self._stream_seconds + UNREAD_SECONDS)

    async def _events(self, order: ChatOrder) -> AsyncGenerator[bytes, None]:
        """The endpoint's events, as they come. Closed, it lets go of the endpoint, which then stops to generate."""
        value, size = msgspec.to_builtins(order) | {"stream": True}, 0
        self._reject_more()
        self.streams += 1
        try:
            async with self._request("POST", "chat/completions", self._stream_seconds, value) as response:
                if response.content_type != "text/event-stream":
                    words = excerpt(response.content_type)
                    raise EndpointError(f"the endpoint answered with {words} and no stream; is it an OpenAI API?")
                async for part in response.content.iter_any():
                    size += len(part)
                    if size > MAX_STREAM_BYTES:
                        raise EndpointError(f"the endpoint sent more than {MAX_STREAM_BYTES} bytes; it was stopped")
                    yield part
                yield b"\n\n"
        except EndpointError:
            yield b"\n\n"  # It may have stopped within an event.
            raise
        finally:
            self.streams -= 1

    def _reject_more(self) -> None:
        if self.streams >= MAX_STREAMS:
            words = f"{MAX_STREAMS} answers are being written already; stop one, or wait for it"
            raise HttpError(503, "overloaded", words, headers=RETRY_AFTER)

    @contextlib.asynccontextmanager
    async def _request(
        self, method: str, path: str, deadline: float, value: object = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The endpoint's answer with status 200. Raises EndpointError for any other, and for what fails meanwhile.

        No redirect is followed and no proxy of the environment asked: nothing but the endpoint is reached.
        """
        timeout = aiohttp.ClientTimeout(total=deadline, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
        url = f"{self._url}/{path}"
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session,
                session.request(method, url, json=value, headers=self._headers, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise EndpointError(_refusal(url, response.status, await _bounded(response, MAX_ERROR_BYTES)))
                yield response
        except aiohttp.ConnectionTimeoutError:
            raise EndpointError(f"{self._url} took no connection within {CONNECT_SECONDS:g} s; does it run?") from None
        except aiohttp.SocketTimeoutError:
            raise EndpointError(f"the endpoint sent nothing for {SILENT_SECONDS:g} s; look at its log") from None
        except asyncio.TimeoutError:
            raise EndpointError(f"the endpoint was not done within {deadline:g} s; it was stopped") from None
        except aiohttp.ClientConnectorError as error:
            words = f"{self._url} cannot be reached ({error.strerror or error}); start the endpoint, or wait"
            raise EndpointError(f"{words} until it says 'serves at'") from None
        except aiohttp.ClientError as error:
            raise EndpointError(f"the connection to {self._url} broke: {error or type(error).__name__}") from None


class TimedStream(EventStream):
    """A stream of `events` that is given up after so many `seconds`, also if the page does not read on. An HttpError
    of theirs is told."""

    def __init__(self, events: AsyncGenerator[bytes, None], seconds: float) -> None:
        super().__init__(HEARTBEAT, events, _describe)
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As `EventStream`. The connection is closed if the time is over."""
        try:
            with Deadline(self._seconds):
                await super().__call__(scope, receive, send)
        except asyncio.TimeoutError:
            raise Disconnected from None


class _Card(msgspec.Struct):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Card]


class _ErrorBody(msgspec.Struct):
    message: str = ""


class _Error(msgspec.Struct):
    error: _ErrorBody


def _address(url: str) -> str:
    """`url` without a closing slash. Raises ConfigError if it is not where an HTTP API may be."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(
            f"--endpoint {excerpt(url)} is no address of an endpoint; give one such as http://127.0.0.1:8000/v1, and "
            f"its API key as {KEY_VARIABLE}"
        )
    return url.rstrip("/")


def reject_other_pages(headers: HeaderMap) -> None:
    """Raises HttpError unless a page of this very server asks, and sends JSON."""
    _reject_other_origins(headers)
    _reject_other_types(headers)


def _reject_other_origins(headers: HeaderMap) -> None:
    """Raises HttpError 403 unless a page of this very server asks. `Host` was checked before (`HostCheck`)."""
    host, origin = headers.get(b"host", b"").lower(), headers.get(b"origin", b"").lower()
    site = headers.get(b"sec-fetch-site", b"same-origin")
    if origin not in (b"http://" + host, b"https://" + host) or site != b"same-origin":
        words = "only the viewer's own page may ask this; open the viewer in a browser, or ask the endpoint itself"
        raise HttpError(403, "forbidden_origin", words, "origin")


def _reject_other_types(headers: HeaderMap) -> None:
    """Raises HttpError 415 unless the body is JSON by its type, which no form of a web page can say."""
    kind = headers.get(b"content-type", b"")
    if kind.partition(b";")[0].strip().lower() != JSON.encode():
        words = f"'content-type' is {excerpt(kind.decode('latin-1'))}; send {JSON!r}"
        raise HttpError(415, "unsupported_media_type", words, "content-type")


async def read_order(request: Request, bodies: RequestBodies, kind: type[_Order], otherwise: str) -> _Order:
    """What a page asks for, of this `kind`. Raises HttpError for a body that is none, of which it says `otherwise`, or
    that `bodies` refuses."""
    body = await bodies.read(request.scope, headers_of(request.scope), request.receive)
    bodies.release(len(body))
    try:
        return msgspec.json.decode(body, type=kind)
    except _NOT_READ as error:
        raise HttpError(400, "bad_request", f"the body {otherwise}: {error}") from None


async def _bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The first `limit` bytes of a body."""
    body = b""
    while len(body) < limit and (part := await response.content.read(limit - len(body))):
        body += part
    return body


def _refusal(url: str, status: int, body: bytes) -> str:
    """Why the endpoint refused, in its own words if it gave some."""
    if status == 401:
        return f"the endpoint asks for an API key, or for another; start the viewer with it in {KEY_VARIABLE}"
    try:
        words = msgspec.json.decode(body, type=_Error).error.message
    except _NOT_READ:
        words = ""
    if not words:
        words = f"{url} answered with status {status}; the address of an eval endpoint ends in /v1"
    return f"the endpoint refuses: {words}" if status < 500 else f"the endpoint failed: {words}"


def _describe(raised: Exception) -> tuple[int, object]:
    """What the stream says of that for which it ends."""
    if not isinstance(raised, HttpError):
        raise raised
    return raised.status, {"error": {"message": raised.message, "type": raised.type}}
