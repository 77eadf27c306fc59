"""The tool that reads pages, of a server of the test's own."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from actions import results, text
from search_providers import Pages

from verl_tool.errors import StartError, ToolFault
from verl_tool.servers.tools import web_page
from verl_tool.servers.tools.base import InvalidCall
from verl_tool.servers.tools.web_page import WebPageTool
from verl_tool.web import page_client, page_reader

pytestmark = pytest.mark.slow


@pytest.fixture
async def pages() -> AsyncIterator[Pages]:
    async with Pages() as made:
        yield made


@pytest.fixture
async def started() -> AsyncIterator[Any]:
    tools: list[WebPageTool] = []

    async def start(**options: Any) -> WebPageTool:
        tools.append(WebPageTool(**{"allow_private_addresses": True, "workers": 1, **options}))
        await tools[-1].start()
        return tools[-1]

    yield start
    for tool in tools:
        await tool.close()


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'web_page', 'arguments': arguments})}</tool_call>"


async def test_a_page_is_read_part_by_part_and_asked_for_once(started: Any, pages: Pages) -> None:
    tool, url = await started(part_length=2000), f"{pages.url}/article"
    first = await text(tool, f"<web_page> {url}#part </web_page>")
    assert first.startswith(f"The harbour of Sandmouth\n{url} (part 1 of ")
    assert first.endswith('\n\n(go on with "page": 2)')
    last = int(first.split(" of ")[2].split(")")[0]) if " of " in first else 0
    parts = [await text(tool, call(url=url, page=n)) for n in range(1, last + 1)]
    assert parts[0] == first
    assert "(go on with" not in parts[-1]
    whole = "".join(parts)
    for n in range(40):
        assert whole.count(f"Paragraph {n} tells") == 1
    assert all(len(part) < 2200 for part in parts)
    assert (await text(tool, call(url=url, page=99))).endswith(f"(there is no part 99; the last one is {last})")
    links = await text(tool, call(url=url, links=True))
    assert links.endswith(f"(links, part 1 of 1)\n\n[Menu]({pages.url}/menu)\n[the other page]({pages.url}/other?a=1)")
    assert pages.asked == ["article"]


async def test_what_is_wrong_with_a_page_is_an_observation(started: Any, pages: Pages) -> None:
    tool = await started(max_kilobytes=64)
    for name, words in {
        "none": "HTTP 404 (Not Found).",
        "pdf": "it is application/pdf; only HTML and plain text can be read.",
        "bomb": "it is larger than 64 KB.",
    }.items():
        for _ in range(2):
            [result] = await results(tool, f"<web_page>{pages.url}/{name}</web_page>")
            assert result.text == f"{pages.url}/{name} cannot be read: {words}"
            assert (result.valid, result.error, result.metrics["pages"]) == (True, True, 0.0)
    assert pages.asked == ["none", "pdf", "bomb"], "it will not be another the next time"
    both = await results(tool, f"<web_page>{pages.url}/plain</web_page> <visit>{pages.url}/none</visit>")
    assert [result.error for result in both] == [False, True]


async def test_what_is_not_public_is_refused_unless_an_option_permits_it(started: Any, pages: Pages) -> None:
    tool = await started(allow_private_addresses=False)
    words = "127.0.0.1 is not a public address, and only those may be read."
    assert (await text(tool, f"<web_page>{pages.url}/plain</web_page>")).endswith(words)
    assert not pages.asked


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("<web_page> </web_page>", "write the address of the page"),
        (call(page=2), "url: "),
        (call(url="https://a.example", page=0), "page: "),
        (call(url="https://a.example", goal="x"), "goal"),
    ],
)
async def test_wrong_calls_say_why(action: str, words: str) -> None:
    with pytest.raises(InvalidCall, match=words):
        await text(WebPageTool(), action)


async def test_pages_are_replayed_without_network_or_sandbox(
    started: Any, pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = await started(cache=tmp_path)
    urls = [f"{pages.url}/{name}" for name in ("article", "none")]
    seen = [await text(live, f"<web_page>{url}</web_page>") for url in urls]
    await pages.stop()
    monkeypatch.setattr(page_reader, "find_spec", lambda name: None)
    replayed = await started(cache=tmp_path, replay=True, allow_private_addresses=False)
    assert [await text(replayed, f"<web_page>{url}</web_page>") for url in urls] == seen
    [missed] = await results(replayed, "<web_page>https://a.example/</web_page>")
    assert missed.text == "https://a.example/ cannot be read: this page is not among the recorded ones."
    assert missed.metrics["not_recorded"] == 1.0


async def test_a_machine_without_a_network_is_a_fault(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*given: Any) -> None:
        raise page_client.socket.gaierror(page_client.socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr("aiohttp.ThreadedResolver.resolve", lost)
    with pytest.raises(ToolFault, match="no name can be looked up on this machine"):
        await text(await started(), "<web_page>https://a.example/</web_page>")


async def test_it_does_not_start_without_its_reader(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_reader, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"trafilatura, which is not installed: source scripts/env\.sh web"):
        await started()


async def test_no_program_is_run_where_its_pages_are_read(started: Any) -> None:
    tool = await started()
    assert tool.sandbox is None
    assert tool.isolation_in_force()
    await tool.check()


def test_a_long_text_is_cut_into_parts_in_linear_time() -> None:
    text = "word\n" * 800_000
    began = time.process_time()
    parts = web_page._parts(text, 200)
    assert time.process_time() - began < 3.0
    assert "".join(parts).replace("\n", "") == "word" * 800_000
    assert max(map(len, parts)) <= 200
    assert web_page._parts("a" + " " * 1_000_000 + "b", 200) == ["a", "b"]
