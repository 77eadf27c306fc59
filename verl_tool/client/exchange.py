"""Send one HTTP request to a tool server. Errors say whether the request may have been run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from verl_tool.client.pacing import seconds_of
from verl_tool.protocol import BEGUN_HEADER, MISDIRECTED, SERVER_HEADER, proof_of

CONNECT_SECONDS = 5.0
"""Deadline for opening a connection. The deadline of the call may be earlier."""
KEEP_ALIVE_SECONDS = 3.0
"""How long an idle connection is kept. Servers close idle connections after 5 s (uvicorn's default) or more. A client
that kept them longer would sometimes send a request while the server closes the connection."""


class ExchangeError(Exception):
    """There is no answer. If `sent`, the request may have reached the server and may have been run."""

    def __init__(self, message: str, *, sent: bool, timed_out: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.sent = sent
        self.timed_out = timed_out


class WrongServerError(ExchangeError):
    """Another server than the intended one is at the address. The intended server has run nothing."""

    def __init__(self, message: str) -> None:
        super().__init__(message, sent=False)


class TooLongError(Exception):
    """An answer is longer than its reader takes."""


async def read_bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body, decompressed. Raises TooLongError as soon as it is longer than `max_bytes`."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_chunked(1 << 16):
        size += len(part)
        if size > max_bytes:
            raise TooLongError
        parts.append(part)
    return b"".join(parts)


@dataclass(frozen=True)
class Answer:
    """The server's answer, with any status."""

    status: int
    headers: Mapping[str, str]
    """Headers; names are case-insensitive."""
    body: bytes

    @property
    def server(self) -> str:
        """Name of the server that answered; empty if it has none."""
        return self.headers.get(SERVER_HEADER, "")

    def words(self) -> str:
        """Return the beginning of the body, for messages."""
        return self.body[:300].decode("utf-8", "replace")

    def retry_after(self) -> float:
        """Return the seconds that the server asks to wait; 0 if it does not."""
        return seconds_of(self.headers.get("retry-after")) or 0.0


class Connections:
    """A pool of connections. Use it in one event loop; `close` it there.

    `api_key` itself is sent to `front`, the server's base URL, only; other addresses get a proof of it.
    """

    def __init__(self, api_key: str | None, front: str) -> None:
        self._api_key = api_key
        self._front = front
        self._headers_of: dict[tuple[bool, str], dict[str, str]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def exchange(
        self, method: str, url: str, body: bytes | None, seconds: float, server: str = "", *, begun: str = ""
    ) -> Answer:
        """Send one request and read the whole answer within `seconds`. `server` is the name of the intended server, if
        it is known, and `begun` the value of `BEGUN_HEADER`.

        Raises ExchangeError, and WrongServerError if another server answered.
        """
        headers = self._headers(url, server)
        if begun:
            headers = {**headers, BEGUN_HEADER: begun}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, CONNECT_SECONDS))
        try:
            async with self._open().request(method, url, data=body, headers=headers, timeout=timeout) as response:
                answer = Answer(response.status, response.headers, await response.read())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ExchangeError(f"no connection to {url}: {error}", sent=False) from error
        except asyncio.TimeoutError as error:
            raise ExchangeError(f"no answer from {url} within {seconds:.3g} s", sent=True, timed_out=True) from error
        except (aiohttp.ClientError, OSError) as error:
            words = str(error) or type(error).__name__
            raise ExchangeError(f"the connection to {url} broke: {words}", sent=True) from error
        if answer.status == MISDIRECTED or (server and answer.status == 200 and answer.server != server):
            raise WrongServerError(f"{url} now belongs to another server; {server or 'the server'} ran nothing")
        return answer

    async def close(self) -> None:
        """Close all connections. It may be called repeatedly."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _headers(self, url: str, server: str) -> dict[str, str]:
        at_front = url.startswith(f"{self._front}/")
        headers = self._headers_of.get((at_front, server))
        if headers is None:
            headers = {"content-type": "application/json"}
            if server:
                headers[SERVER_HEADER] = server
            if self._api_key is not None:
                key = self._api_key if at_front else proof_of(self._api_key, server)
                headers["authorization"] = f"Bearer {key}"
            # A server has a new name after each start.
            self._headers_of = {key: known for key, known in self._headers_of.items() if key[1] in ("", server)}
            self._headers_of[at_front, server] = headers
        return headers

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session
