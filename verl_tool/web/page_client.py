"""Fetch pages of the web, within limits of time and size, and from public addresses only."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from verl_tool.client.exchange import TooLongError, read_bounded
from verl_tool.client.pacing import seconds_of
from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.web.addresses import Address, CheckedResolver, ForbiddenAddress, anything, check_literal, is_public

MAX_REDIRECTS = 5
MAX_URL_CHARACTERS = 2000
CONNECT_SECONDS = 10.0
KNOWN_HOST = "example.org"
"""Resolved to find out whether this machine has a network, after another name could not be resolved."""
KEEP_ALIVE_SECONDS = 3.0
_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (429, 503)
_LONGEST_PAUSE = 10.0
"""Maximum time in seconds to wait for a busy site, once."""
_HTML = ("text/html", "application/xhtml+xml")
_TEXT = ("application/json", "application/xml", "application/ld+json", "application/rss+xml", "application/atom+xml")
_WITHOUT_SCHEME = re.compile(r"[\w-]+(\.[\w-]+)*\.[a-z]{2,}(:\d+)?([/?#].*)?", re.IGNORECASE)


@dataclass(frozen=True)
class FileKinds:
    """Kinds of files that are read."""

    accept: str
    """Value of the header ``accept``."""
    types: tuple[str, ...]
    """Media types, or their beginnings up to the slash."""
    words: str
    """End of the error message for other kinds."""

    def takes(self, kind: str) -> bool:
        return kind in self.types or f"{kind.partition('/')[0]}/" in self.types


PAGES = FileKinds(
    "text/html, text/*;q=0.9, */*;q=0.1", (*_HTML, *_TEXT, "text/"), "only HTML and plain text can be read"
)
IMAGES = FileKinds("image/*", ("image/",), "only images can be read")


class PageUnavailableError(Exception):
    """There is no page to read. The message gives the model the reason."""

    def __init__(self, message: str, lasting: bool = True) -> None:
        super().__init__(message)
        self.lasting = lasting
        """Whether a retry would probably fail in the same way."""


@dataclass(frozen=True)
class Page:
    url: str
    """URL after all redirects."""
    is_html: bool
    charset: str | None
    """Charset in the server's headers."""
    body: bytes


class PageClient:
    """A pool of connections, to be used and closed in one event loop."""

    def __init__(
        self,
        *,
        user_agent: str,
        max_bytes: int,
        max_concurrent: int,
        max_per_host: int,
        allow_private_addresses: bool = False,
        resolver: AbstractResolver | None = None,
        wanted: FileKinds = PAGES,
    ) -> None:
        """`max_bytes` limits a decompressed page. `resolver` replaces that of the system. `wanted` are the kinds of
        files to read."""
        self._wanted = wanted
        self._allowed: Callable[[Address], bool] = anything if allow_private_addresses else is_public
        self._user_agent = user_agent
        self._max_bytes = max_bytes
        self._max_concurrent, self._max_per_host = max_concurrent, max_per_host
        self._given = resolver
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections. May be called repeatedly."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    @property
    def _looks_up(self) -> AbstractResolver:
        return self._given or aiohttp.ThreadedResolver()

    async def get(self, address: str, seconds: float) -> Page:
        """Fetch the page at `address` within `seconds`.

        Raises PageUnavailableError for any failure caused by the page, its server or its address, and ToolFault if this
        machine has no network.
        """
        url = checked_url(address)
        try:
            return await asyncio.wait_for(self._follow(url), seconds)
        except asyncio.TimeoutError:
            raise PageUnavailableError(f"no answer within {seconds:g} seconds", lasting=False) from None

    async def _follow(self, url: URL) -> Page:
        paused = False
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._once(url)
            if isinstance(answer, _Busy) and not paused and answer.seconds <= _LONGEST_PAUSE:
                paused = True
                await asyncio.sleep(answer.seconds)
                answer = await self._once(url)
            if isinstance(answer, _Busy):
                raise PageUnavailableError(_status_words(answer.status), lasting=False)
            if isinstance(answer, Page):
                return answer
            url = answer
        raise PageUnavailableError(f"more than {MAX_REDIRECTS} redirects")

    async def _once(self, url: URL) -> Page | URL | _Busy:
        """Make one request. Return the page, the target of a redirect, or `_Busy`."""
        try:
            check_literal(url.host or "", self._allowed)
            async with self._open().get(url, allow_redirects=False) as response:
                return await self._read(url, response)
        except ForbiddenAddress as error:
            raise PageUnavailableError(f"{error}, and only those may be read", lasting=False) from error
        except aiohttp.ClientConnectorError as error:
            if isinstance(error, aiohttp.ClientConnectorDNSError) and error.os_error.errno == socket.EAI_AGAIN:
                await self._check_network()
            raise _unreached(error) from error
        except aiohttp.InvalidURL as error:
            raise PageUnavailableError("this is no address of a page") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PageUnavailableError(f"the connection failed ({type(error).__name__})", lasting=False) from error

    async def _read(self, url: URL, response: aiohttp.ClientResponse) -> Page | URL | _Busy:
        status = response.status
        if status in _REDIRECTS and "location" in response.headers:
            return checked_url(response.headers["location"], base=url)
        if status in _BUSY:
            return _Busy(status, seconds_of(response.headers.get("retry-after")) or 1.0)
        if status != 200:
            raise PageUnavailableError(_status_words(status), lasting=400 <= status < 500)
        kind = response.content_type
        if not self._wanted.takes(kind):
            raise PageUnavailableError(f"it is {kind}; {self._wanted.words}")
        try:
            content = await read_bounded(response, self._max_bytes)
        except TooLongError:
            raise PageUnavailableError(f"it is larger than {self._max_bytes >> 10} KB") from None
        return Page(str(url), kind in _HTML, response.charset, content)

    async def _check_network(self) -> None:
        """Raise ToolFault if this machine cannot resolve any name, which is not the fault of a page."""
        try:
            await self._looks_up.resolve(KNOWN_HOST)
        except OSError as error:
            words = f"no name can be looked up on this machine, {KNOWN_HOST} neither: {error}"
            raise ToolFault(FaultKind.UNREACHABLE, words, retryable=True) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self._max_concurrent,
                limit_per_host=self._max_per_host,
                keepalive_timeout=KEEP_ALIVE_SECONDS,
                use_dns_cache=False,
                resolver=CheckedResolver(self._allowed, self._looks_up),
            )
            headers = {"user-agent": self._user_agent, "accept": self._wanted.accept}
            self._session = aiohttp.ClientSession(
                connector=connector,
                connector_owner=True,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            )
        return self._session


@dataclass(frozen=True)
class _Busy:
    status: int
    seconds: float
    """Time to wait before a retry."""


def checked_url(address: str, base: URL | None = None) -> URL:
    """Parse `address`, relative to `base` if given, as a URL, and remove its fragment.

    An address without a scheme, such as ``example.org/a``, gets the scheme https. Raises PageUnavailableError.
    """
    text = address.strip()
    if len(text) > MAX_URL_CHARACTERS:
        raise PageUnavailableError(f"the address has {len(text)} characters; at most {MAX_URL_CHARACTERS} are taken")
    if base is None and "://" not in text and _WITHOUT_SCHEME.fullmatch(text):
        text = f"https://{text}"
    try:
        url = URL(text) if base is None else base.join(URL(text))
        host = url.host
    except ValueError:
        raise PageUnavailableError(f"{text[:200]!r} is no address of a page") from None
    if url.scheme not in ("http", "https"):
        raise PageUnavailableError(f"{text[:200]!r} is no address that begins with http:// or https://")
    if not host:
        raise PageUnavailableError(f"{text[:200]!r} names no host")
    if url.user is not None or url.password is not None:
        raise PageUnavailableError("the address holds a user name or password; leave it out")
    return url.with_fragment(None)


def _unreached(error: aiohttp.ClientConnectorError) -> PageUnavailableError:
    """Convert a failure to connect to an error with a message for the model."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return PageUnavailableError("its certificate is not valid")
    if isinstance(error, aiohttp.ClientSSLError):
        return PageUnavailableError("no secure connection could be made")
    if isinstance(error.os_error, ForbiddenAddress):
        return PageUnavailableError(f"{error.os_error}, and only those may be read", lasting=False)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return PageUnavailableError("there is no such host", lasting=False)
    return PageUnavailableError("the host could not be connected to", lasting=False)


def _status_words(status: int) -> str:
    try:
        return f"HTTP {status} ({HTTPStatus(status).phrase})"
    except ValueError:
        return f"HTTP {status}"
