"""MCP over HTTP: streamable HTTP, and server-sent events as of protocol 2024-11-05. Both are the SDK's; what a server
sends is bounded here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from verl_tool.servers.mcp.bounds import MAX_BYTES, MAX_MESSAGE_BYTES, Budget, TooMuchError

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 3600.0
"""Between two bytes of a stream of events. Calls have deadlines of their own."""


class HttpLink:
    """The server behind one client."""

    def __init__(self, url: str, headers: Mapping[str, str], budget: Budget, *, sse: bool) -> None:
        self._url, self._headers, self._sse = url, dict(headers), sse
        self._transport_of = lambda: _Bounded(budget, self)
        self.ended = False
        self.why = ""

    def last_words(self) -> str:
        """What went wrong last; may be empty."""
        return self.why

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportStreams]:
        """As a transport of the SDK. Raises httpx2.HTTPError if the server cannot be reached."""
        if self._sse:
            async with sse_client(
                self._url,
                headers=self._headers,
                timeout=_CONNECT_SECONDS,
                sse_read_timeout=_IDLE_SECONDS,
                httpx_client_factory=self._client,
            ) as streams:
                yield streams
            return
        async with (
            self._client(self._headers, httpx2.Timeout(_CONNECT_SECONDS, read=_IDLE_SECONDS)) as client,
            streamable_http_client(self._url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
        ):
            yield streams

    def _client(
        self,
        headers: dict[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
    ) -> httpx2.AsyncClient:
        # Neither proxies nor netrc of the environment. Compressed, a small answer may be of any size.
        plain = {"accept-encoding": "identity", **(headers or {})}
        return httpx2.AsyncClient(
            transport=self._transport_of(), headers=plain, timeout=timeout, auth=auth, trust_env=False
        )


class _Bounded(httpx2.AsyncHTTPTransport):
    """Counts what comes."""

    def __init__(self, budget: Budget, link: HttpLink) -> None:
        super().__init__(trust_env=False)
        self._budget, self._link = budget, link

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await super().handle_async_request(request)
        except httpx2.HTTPError as error:
            self._link.why = f"{type(error).__name__}: {error}"
            raise
        try:
            # However empty it is: a server may have its clients ask again and again.
            self._budget.take(0)
        except TooMuchError as error:
            await response.aclose()
            self._link.why = str(error)
            raise httpx2.RemoteProtocolError(self._link.why, request=request) from None
        if response.status_code >= 400:
            self._link.why = f"HTTP {response.status_code}"
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            self._link.why = "its answer is compressed, which was not asked for"
            raise httpx2.RemoteProtocolError(self._link.why, request=request)
        is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        maximum = MAX_BYTES if is_stream else MAX_MESSAGE_BYTES
        response.stream = _Counted(response.stream, self._budget, maximum, self._link, request)
        return response


class _Counted(httpx2.AsyncByteStream):
    def __init__(self, stream: Any, budget: Budget, most: int, link: HttpLink, request: httpx2.Request) -> None:
        self._stream, self._budget, self._left = stream, budget, most
        self._link, self._request = link, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._left -= len(part)
            try:
                if self._left < 0:
                    raise TooMuchError("its answer is larger than an MCP message may be")
                self._budget.take(len(part))
            except TooMuchError as error:
                self._link.why = str(error)
                raise httpx2.ReadError(str(error), request=self._request) from None
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
