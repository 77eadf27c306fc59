"""Reading pages, in a real sandbox."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio
from search_providers import HTML

from verl_tool.sandbox import Level, SandboxPool
from verl_tool.web.page_client import Page, PageUnavailableError
from verl_tool.web.page_reader import new_pool, readable

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
URL = "https://sandmouth.example/a/harbour"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with new_pool(1, Level.full) as made:
        yield made


async def test_the_article_is_read_and_the_menu_is_not(pool: SandboxPool) -> None:
    found = await readable(Page(URL, True, "utf-8", HTML.encode()), pool)
    assert found.title == "The harbour of Sandmouth"
    assert "which Mira Tolk painted in the year 1805" in found.text
    assert "Menu" not in found.text
    assert [*map(tuple, found.links)] == [
        ("Menu", "https://sandmouth.example/menu"),
        ("the other page", "https://sandmouth.example/a/other?a=1"),
    ]


async def test_charsets_are_those_of_the_server_or_of_the_page(pool: SandboxPool) -> None:
    body = "<html><head><meta charset='iso-8859-1'></head><body><p>Größe der Brücke am Fluß.</p></body></html>"
    for told, sent in (("iso-8859-1", "latin-1"), (None, "latin-1"), ("no-such-charset", "latin-1")):
        found = await readable(Page(URL, True, told, body.encode(sent)), pool)
        assert "Größe der Brücke am Fluß." in found.text, told
    assert (await readable(Page(URL, False, "no-such", "Größe".encode()), pool)).text == "Größe"


@pytest.mark.parametrize(
    "body",
    [b"", b"\x00\xff\xfe", b"<", b"<html>" * 1000, b"<div>" * 60_000 + b"deep", b"<!DOCTYPE a [<!ENTITY b 'c'>]>&b;"],
)
async def test_odd_pages_are_read_or_refused(body: bytes, pool: SandboxPool) -> None:
    with suppress(PageUnavailableError):
        assert len((await readable(Page(URL, True, None, body), pool)).text) < 1000
    assert "Mira Tolk" in (await readable(Page(URL, True, "utf-8", HTML.encode()), pool)).text


@pytest.mark.parametrize("charset", ["punycode", "idna", "undefined", "hex", "no such", None])
async def test_a_page_does_not_choose_a_codec_that_takes_long(charset: str | None) -> None:
    began = time.process_time()
    read = await readable(Page("http://a", False, charset, b"abc-" * 1_000_000), None)  # type: ignore[arg-type]
    assert time.process_time() - began < 2.0
    assert read.text == "abc-" * 125_000
