"""Requests to a service over HTTP, whose answers are JSON, and which faults its failures are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

from verl_tool.client.exchange import read_bounded
from verl_tool.client.pacing import BusyFault, seconds_of
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import FaultKind

CONNECT_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 3.0
"""Services close an idle connection after 5 s or more; one that is kept longer may be closed as it is used."""
MAX_ANSWER_BYTES = 4 << 20
"""Of an answer, decompressed."""
_FOREIGN = (401, 402, 403, 404, 405, 407, 432, 433)
"""Statuses that tell of a wrong address or key, or of a plan that is used up (402; 432 and 433 are Tavily's)."""
_BUSY = (429, 503)


class ServiceRejectedError(Exception):
    """The service refuses what it was sent (HTTP 4xx)."""


class RemoteService:
    """One service at `url`. Use it in one event loop; `close` it there.

    A request leaves nothing behind there, so it is safe to be sent again even if it was answered: each fault says so,
    except those that no second request would mend. `api_key` is sent in the header `key_header`, and no error holds it.
    `settings`: where address and key are set, for errors.

    Raises ConfigError if no header can hold the key.
    """

    failing, slow = FaultKind.UNREACHABLE, FaultKind.OVERLOADED
    """What it is if the service fails, and if it gives no answer in time."""

    def __init__(
        self,
        name: str,
        url: str,
        api_key: str | None,
        max_concurrent: int,
        queue_seconds: float,
        *,
        key_header: str = "authorization",
        settings: str = "the options url and api_key",
    ) -> None:
        self.url = url
        self._name = name
        self._settings = settings
        self._key = api_key
        self._headers = {"content-type": "application/json", **key_headers(name, api_key, key_header, settings)}
        self._places = asyncio.Semaphore(max_concurrent)
        self._queue_seconds = queue_seconds
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections. Doing so twice is no error."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        """The JSON of its answer, which must come within `seconds` once the request has a place. Raises ToolFault;
        RefusedError if the service refuses the request, TooLongError if the answer is too long."""
        try:
            await asyncio.wait_for(self._places.acquire(), self._queue_seconds)
        except asyncio.TimeoutError as error:
            words = f"no place for a request to {self._name} within {self._queue_seconds:g} s (queue_seconds)"
            raise ToolFault(FaultKind.OVERLOADED, words, retryable=True) from error
        try:
            status, text, retry_after = await self._exchange(method, f"{self.url}{path}", body, seconds)
        finally:
            self._places.release()
        return self._read(status, text, retry_after)

    async def _exchange(
        self, method: str, url: str, body: Mapping[str, Any] | None, seconds: float
    ) -> tuple[int, bytes, str | None]:
        """Status, body, and the header ``Retry-After``."""
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, CONNECT_SECONDS))
        options: dict[str, Any] = {"timeout": timeout, "allow_redirects": False, "headers": self._headers}
        # Half a surrogate pair, which a model may write, is no Unicode: a service would fail at it.
        data = None if body is None else json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        try:
            async with self._open().request(method, url, data=data, **options) as response:
                text = await read_bounded(response, MAX_ANSWER_BYTES)
                return response.status, text, response.headers.get("retry-after")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise self._fault(FaultKind.UNREACHABLE, f"no connection: {error}") from error
        except asyncio.TimeoutError as error:
            retryable = self.slow is not FaultKind.TIMEOUT
            raise self._fault(self.slow, f"no answer within {seconds:.3g} s", retryable) from error
        except (aiohttp.ClientError, OSError) as error:
            words = str(error) or type(error).__name__
            raise self._fault(FaultKind.UNREACHABLE, f"the connection broke: {words}") from error

    def _read(self, status: int, text: bytes, retry_after: str | None) -> Any:
        words = f"HTTP {status}: {self._without_key(text.decode('utf-8', 'replace'))[:300]}"
        if 300 <= status < 400:
            raise self._fault(FaultKind.MISCONFIGURED, f"HTTP {status}: redirects are not followed", retryable=False)
        if status in _FOREIGN:
            raise self._fault(FaultKind.MISCONFIGURED, f"{words}; see to {self._settings}", retryable=False)
        if status in _BUSY:
            pause = seconds_of(retry_after)
            words += "" if pause is None else f"; it wishes to be left alone for {pause:g} s"
            raise BusyFault(f"{self._name} at {self.url}: {words}", pause)
        if 400 <= status < 500:
            raise ServiceRejectedError(words)
        if status != 200:
            raise self._fault(self.failing, words)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.malformed(text.decode("utf-8", "replace")) from error

    def malformed(self, answer: object) -> ToolFault:
        """The fault of an answer that is not of the service's form."""
        excerpt = self._without_key(str(answer))[:300]
        return self._fault(self.failing, f"an answer of another form than {self._name}'s: {excerpt}")

    def _fault(self, kind: FaultKind, words: str, retryable: bool = True) -> ToolFault:
        return ToolFault(kind, f"{self._name} at {self.url}: {words}", retryable)

    def _without_key(self, text: str) -> str:
        """Some services quote the key that they do not know, as it is or as it is written in JSON or an address."""
        key = self._key
        for form in (key, json.dumps(key)[1:-1], key.replace("/", "\\/"), quote(key, safe="")) if key else ():
            text = text.replace(form, "[the key]")
        return text

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session


class CodeService(RemoteService):
    """One that runs programs, which may be the cause that it is slow."""

    failing, slow = FaultKind.SANDBOX, FaultKind.TIMEOUT


def key_headers(
    name: str, api_key: str | None, header: str = "authorization", settings: str = "the options url and api_key"
) -> dict[str, str]:
    """The header with a key, if there is one. Raises ConfigError if no header can hold it."""
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        words = "a line end or another character that no header can hold"
        raise ConfigError(f"the key of {name} has {words}; see to {settings}")
    return {header: f"Bearer {api_key}" if header == "authorization" else api_key}


def base_url(tool: str, url: str) -> str:
    """`url` without a slash at its end. Raises ConfigError if it is no HTTP address."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
        _ = parts.port
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"tool {tool}: option url is {url!r:.80}; give an address such as 'http://127.0.0.1:8080'")
    if "@" in parts.netloc:
        raise ConfigError(f"tool {tool}: option url holds a user name or password; set the option api_key instead")
    return url.rstrip("/")
