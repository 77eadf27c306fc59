"""One HTTP exchange with a tool server, and what its failure says about whether the request was run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

CONNECT_SECONDS = 5.0
"""Deadline for a connection; the call's own deadline may be nearer."""
KEEP_ALIVE_SECONDS = 3.0
"""How long an idle connection is kept. Servers close theirs after 5 s (uvicorn's default) or more; a client that kept
one longer would now and then send a request into a connection that is being closed."""


class ExchangeError(Exception):
    """There is no answer. `sent`: the request may have reached the server, and may have been run."""

    def __init__(self, message: str, *, sent: bool, timed_out: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.sent = sent
        self.timed_out = timed_out


@dataclass(frozen=True)
class Answer:
    """What the server answered, whatever its status."""

    status: int
    headers: Mapping[str, str]
    """Names are found whatever their case."""
    body: bytes

    def words(self) -> str:
        """The beginning of the body, for messages."""
        return self.body[:300].decode("utf-8", "replace")

    def retry_after(self) -> float:
        """Seconds that the server asks to wait; 0 if it says nothing, or names a date."""
        try:
            return max(0.0, float(self.headers.get("retry-after", "0")))
        except ValueError:
            return 0.0


class Connections:
    """A pool of connections. Use it in one event loop; `close` it there."""

    def __init__(self, api_key: str | None) -> None:
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def exchange(self, method: str, url: str, body: bytes | None, seconds: float) -> Answer:
        """Send one request and read the whole answer in `seconds`. Raises ExchangeError."""
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, CONNECT_SECONDS))
        try:
            async with self._open().request(method, url, data=body, timeout=timeout) as response:
                return Answer(response.status, response.headers, await response.read())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ExchangeError(f"no connection to {url}: {error}", sent=False) from error
        except asyncio.TimeoutError as error:
            raise ExchangeError(f"no answer from {url} within {seconds:.3g} s", sent=True, timed_out=True) from error
        except (aiohttp.ClientError, OSError) as error:
            words = str(error) or type(error).__name__
            raise ExchangeError(f"the connection to {url} broke: {words}", sent=True) from error

    async def close(self) -> None:
        """Close all connections. Doing so twice is no error."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session
