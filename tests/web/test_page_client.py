"""Getting pages: from a server of the test's own, and from nowhere that is not public."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from search_providers import HTML, Pages
from yarl import URL

from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.web import page_client
from verl_tool.web.addresses import Address
from verl_tool.web.page_client import PageClient, PageUnavailableError, checked_url

pytestmark = pytest.mark.slow


@pytest.fixture
async def pages() -> AsyncIterator[Pages]:
    async with Pages() as made:
        yield made


@pytest.fixture
async def client() -> AsyncIterator[Callable[..., PageClient]]:
    made: list[PageClient] = []

    def new(**options: Any) -> PageClient:
        usual = {"user_agent": "t", "max_bytes": 1 << 20, "max_concurrent": 4, "max_per_host": 2}
        made.append(PageClient(**{"allow_private_addresses": True, **usual, **options}))
        return made[-1]

    yield new
    for each in made:
        await each.close()


async def refusal(client: PageClient, address: str, seconds: float = 10.0) -> str:
    with pytest.raises(PageUnavailableError) as caught:
        await client.get(address, seconds)
    return str(caught.value)


async def test_pages_come_with_their_address_type_and_charset(client: Any, pages: Pages) -> None:
    page = await client().get(f"{pages.url}/to?where=/article%23part", 10)
    assert (page.url, page.is_html, page.body.decode()) == (f"{pages.url}/article", True, HTML)
    plain = await client().get(f"{pages.url}/plain", 10)
    assert (plain.is_html, plain.body) == (False, b"plain words")
    assert (await client().get(f"{pages.url}/latin1", 10)).charset == "iso-8859-1"


async def test_what_is_no_page_says_why(client: Any, pages: Pages) -> None:
    own, url = client(), pages.url
    assert await refusal(own, f"{url}/none") == "HTTP 404 (Not Found)"
    assert await refusal(own, f"{url}/pdf") == "it is application/pdf; only HTML and plain text can be read"
    assert await refusal(own, f"{url}/bomb") == "it is larger than 1024 KB"
    assert await refusal(own, f"{url}/slow", 0.2) == "no answer within 0.2 seconds"
    assert await refusal(own, f"{url}/to?where=/to") == "HTTP 500 (Internal Server Error)"
    assert "could not be connected" in await refusal(own, "http://127.0.0.1:9")
    assert "secure connection" in await refusal(own, url.replace("http:", "https:"))


async def test_redirects_are_followed_a_few_times(client: Any, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    there = "/article"
    for _ in range(5):
        there = str(URL("/to").with_query(where=there))
    assert (await client().get(f"{pages.url}{there}", 10)).is_html
    once_more = str(URL("/to").with_query(where=there))
    assert await refusal(client(), f"{pages.url}{once_more}") == "more than 5 redirects"


async def test_a_busy_site_is_asked_once_more(client: Any, pages: Pages) -> None:
    pages.busy = 1
    assert (await client().get(f"{pages.url}/busy", 20)).body == b"at last"
    pages.busy = 2
    assert await refusal(client(), f"{pages.url}/busy", 20) == "HTTP 429 (Too Many Requests)"


@pytest.mark.parametrize(
    "address",
    [
        *("http://127.0.0.1/", "http://localhost/", "http://[::1]/", "http://2130706433/", "http://127.1", "http://0/"),
        *("http://0x7f.1/", "http://１２７.0.0.1/", "http://169.254.169.254/latest/meta-data/", "10.0.0.1.nip"),
        *(
            "http://[::ffff:127.0.0.1]/",
            "http://[64:ff9b::7f00:1]/",
            "https://LOCALHOST:8443",
            "http://[fe80::1%25lo]/",
        ),
    ],
)
async def test_what_is_not_public_is_refused(address: str, client: Any) -> None:
    own = client(allow_private_addresses=False)
    if address == "10.0.0.1.nip":
        own = client(allow_private_addresses=False, resolver=Names(["10.0.0.1"]))
    words = await refusal(own, address)
    assert "only those may be read" in words or "no address of a page" in words, words


async def test_redirects_to_what_is_not_public_are_refused(client: Any, pages: Pages) -> None:
    def only_this(address: Address) -> bool:
        return str(address) == "127.0.0.1"

    own = client()
    own._allowed = only_this
    for where in ("http://127.0.0.2/", "//[::1]/a", "http://169.254.169.254/", "http://localhost.example/"):
        own._given = Names(["127.0.0.3"])
        assert "public address" in await refusal(own, str(URL(f"{pages.url}/to").with_query(where=where)))
    for where in ("file:///etc/passwd", "ftp://a.example/", "gopher://a.example", "data:text/html,a"):
        words = await refusal(own, str(URL(f"{pages.url}/to").with_query(where=where)))
        assert "begins with http:// or https://" in words
    assert set(pages.asked) == {"to"}


class Names(AbstractResolver):
    """Looks every name up anew: each time the next of these addresses."""

    def __init__(self, addresses: list[str] | OSError) -> None:
        self.addresses = addresses
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list:
        self.asked.append(host)
        if isinstance(self.addresses, OSError):
            raise self.addresses
        address = self.addresses[min(len(self.asked), len(self.addresses)) - 1]
        found = ResolveResult(hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=0)
        return [found]

    async def close(self) -> None:
        pass


async def test_what_was_checked_is_what_is_connected_to(client: Any, pages: Pages) -> None:
    names = Names(["127.0.0.1", "127.0.0.2"])
    own = client(resolver=names)
    own._allowed = lambda address: str(address) == "127.0.0.1"
    port = URL(pages.url).port
    assert (await own.get(f"http://rebound.example:{port}/plain", 10)).body == b"plain words"
    assert names.asked == ["rebound.example"], "one look-up, which is checked and used"
    await asyncio.sleep(0)
    assert "does not lead to a public address" in await refusal(own, "http://rebound.example:81/plain")


async def test_a_machine_without_a_network_is_a_fault_and_a_name_that_is_not_there_is_not(client: Any) -> None:
    lost = Names(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))
    with pytest.raises(ToolFault) as caught:
        await client(resolver=lost).get("https://a.example", 10)
    assert (caught.value.kind, caught.value.retryable) == (FaultKind.UNREACHABLE, True)
    assert lost.asked == ["a.example", page_client.KNOWN_HOST]
    unknown = Names(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    assert await refusal(client(resolver=unknown), "https://a.example") == "there is no such host"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "no address that begins with"),
        ("who painted it", "no address that begins with"),
        ("file:///etc/passwd", "no address that begins with"),
        ("javascript:alert(1)", "no address that begins with"),
        ("http://", "no address of a page|names no host"),
        ("http://a.example:99999/", "no address of a page"),
        ("http://u:p@a.example/", "user name or password"),
        ("http://a.example/" + "a" * 2000, "2017 characters; at most 2000"),
    ],
)
def test_what_is_no_address_of_a_page(address: str, words: str) -> None:
    with pytest.raises(PageUnavailableError, match=words):
        checked_url(address)


def test_an_address_without_scheme_is_one_of_https() -> None:
    assert str(checked_url(" en.example.org/wiki/A?b=c#d ")) == "https://en.example.org/wiki/A?b=c"
    assert str(checked_url("b", base=URL("http://a.example/x/y"))) == "http://a.example/x/b"
