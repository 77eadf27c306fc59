"""The tools that search the web, against stand-ins of the providers."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from actions import results, text
from aiohttp import web
from live_server import LiveServers
from search_providers import KEY, KEYS, NOTHING, QUERY, Providers

from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError, StartError, ToolFault
from verl_tool.formats import SEARCH_TAGS
from verl_tool.protocol import FaultKind, StepRequest
from verl_tool.servers.tools import load_tools, tool_class
from verl_tool.servers.tools.base import InvalidCall
from verl_tool.servers.tools.web_search import NOTHING_FOUND, WebSearchTool

ODD = '"C++" & C#: 100% ≠ %2B größer\nq=1'
FOUND = "[1] The harbour of Sandmouth\nhttps://sandmouth.example/harbour\nMira Tolk painted it & more."


@pytest.fixture
async def providers() -> AsyncIterator[Providers]:
    async with Providers() as made:
        yield made


@pytest.fixture
async def started(providers: Providers, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Starts a tool that asks the stand-in, with a key."""
    for variable in KEYS.values():
        monkeypatch.setenv(variable, KEY)
    tools: list[WebSearchTool] = []

    async def start(name: str = "web_search", **options: Any) -> WebSearchTool:
        tool = tool_class(name)(**{"url": providers.url, **options})
        assert isinstance(tool, WebSearchTool)
        tools.append(tool)
        await tool.start()
        return tool

    yield start
    for tool in tools:
        await tool.close()


def searched(query: str, name: str = "search") -> str:
    return f"<{name}>{query}</{name}>"


@pytest.mark.parametrize("provider", ["serper", "brave", "tavily", "brightdata", "searxng"])
async def test_every_provider_is_asked_and_read_as_its_documentation_says(
    provider: str, started: Any, providers: Providers
) -> None:
    tool = await started(provider=provider, max_results=5)
    assert await text(tool, searched(QUERY)) == FOUND
    assert await text(tool, searched(NOTHING)) == NOTHING_FOUND
    assert await text(tool, searched(ODD)) == FOUND
    asked = [(each["provider"], each["query"]) for each in providers.asked]
    assert asked == [(provider, QUERY), (provider, NOTHING), (provider, ODD)]
    assert {each["count"] for each in providers.asked} <= {0, 5}, "0: the provider has no such parameter"


@pytest.mark.parametrize(
    ("name", "provider"), [("web_search", "serper"), ("google_search", "serper"), ("bing_search", "brightdata")]
)
async def test_it_goes_by_three_names_each_with_its_provider(
    name: str, provider: str, started: Any, providers: Providers
) -> None:
    tool = await started(name)
    for action in (
        *(each.replace("capital of France", QUERY) for each in tool.example_actions),
        f'<tool_call>{{"name": "google_search", "arguments": {{"query": "{QUERY}"}}}}</tool_call>',
        searched(QUERY, "bing_search"),
    ):
        assert await text(tool, action) == FOUND
    assert [each["provider"] for each in providers.asked] == [provider], "asked once, and remembered"
    [call] = tool.recognise(searched(QUERY))
    assert call.format is SEARCH_TAGS


def test_search_is_still_the_tool_of_a_corpus() -> None:
    assert tool_class("search").name == "search_retrieval"
    assert [tool.name for tool in load_tools("serp_search")] == ["google_search"]


async def test_several_queries_are_answered_each_under_its_name(started: Any) -> None:
    action = f'<tool_call>{{"name": "search", "arguments": {{"queries": ["{QUERY}", "{NOTHING}"]}}}}</tool_call>'
    [result] = await results(await started(), action)
    assert result.text == f"Query: {QUERY}\n{FOUND}\n\nQuery: {NOTHING}\n{NOTHING_FOUND}"
    assert result.metrics == {"queries": 2.0, "pages": 1.0, "not_recorded": 0.0}


async def test_long_words_of_a_page_are_cut(started: Any) -> None:
    assert (await text(await started(result_length=20), searched(QUERY))).endswith("\nMira Tolk painted it…")


@pytest.mark.parametrize(
    ("provider", "query", "words"),
    [
        ("serper", " ", "the query is empty"),
        ("tavily", "a" * 401, "has 401 characters; at most 400"),
        ("brave", "a " * 51, "more than 50 words"),
    ],
)
async def test_a_query_that_no_provider_takes_is_told_to_the_model(
    provider: str, query: str, words: str, started: Any, providers: Providers
) -> None:
    with pytest.raises(InvalidCall, match=words):
        await text(await started(provider=provider), searched(query))
    assert not providers.asked


@pytest.mark.parametrize(
    ("status", "body", "kind", "retryable", "words"),
    [
        (400, {"message": "Not enough credits", "statusCode": 400}, FaultKind.MISCONFIGURED, False, "Not enough"),
        (400, {"message": "Query not allowed"}, FaultKind.BAD_REQUEST, False, "refuses a query: HTTP 400"),
        (403, {"message": f"{KEY} is unknown"}, FaultKind.MISCONFIGURED, False, "the variable SERPER_API_KEY"),
        (432, {"detail": "plan limit"}, FaultKind.MISCONFIGURED, False, "HTTP 432"),
        (429, {"message": "slow down"}, FaultKind.OVERLOADED, True, "HTTP 429"),
        (502, {"message": "bad gateway"}, FaultKind.UNREACHABLE, True, "HTTP 502"),
        (200, {"message": f"a new form, {KEY}"}, FaultKind.UNREACHABLE, True, "it has no list 'organic'"),
        (200, {"organic": [{"title": "a"}]}, FaultKind.UNREACHABLE, True, "no text 'link'"),
        (302, {}, FaultKind.MISCONFIGURED, False, "redirects are not followed"),
    ],
)
async def test_a_provider_that_fails_is_a_fault_that_no_model_reads_and_that_holds_no_key(
    status: int,
    body: dict[str, Any],
    kind: FaultKind,
    retryable: bool,
    words: str,
    started: Any,
    providers: Providers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    tool = await started(total_seconds=0.2)
    providers.instead = [web.json_response(body, status=status, headers={"location": "/a"})]
    with pytest.raises(ToolFault) as caught:
        await text(tool, searched(QUERY))
    assert (caught.value.kind, caught.value.retryable) == (kind, retryable)
    assert words in caught.value.message
    assert KEY not in caught.value.message + caplog.text
    assert await text(tool, searched(QUERY)) == FOUND, "a fault is not remembered"


async def test_a_key_is_read_without_the_line_end_of_its_file(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", f"{KEY}\n")
    assert await text(await started(), searched(QUERY)) == FOUND


@pytest.mark.parametrize("key", ["k3y\nof two lines", "schlüssel"])
async def test_a_key_that_cannot_be_sent_is_refused_at_the_start(
    key: str, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERPER_API_KEY", key)
    with pytest.raises(ConfigError, match=r"the key of serper has a line end or .* SERPER_API_KEY") as caught:
        await started()
    assert key not in str(caught.value)


async def test_a_key_that_a_provider_quotes_in_another_form_is_in_no_error(
    started: Any, providers: Providers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERPER_API_KEY", 'a+b/c"d=')
    tool = await started()
    quoted = r'{"plain": "a+b/c"d=", "json": "a+b/c\"d=", "slashes": "a+b\/c"d=", "address": "a%2Bb%2Fc%22d%3D"}'
    providers.instead = [web.Response(text=quoted, status=403)]
    with pytest.raises(ToolFault) as caught:
        await text(tool, searched(QUERY))
    assert caught.value.message.count("[the key]") == 4, caught.value.message


async def test_a_metasearch_whose_engines_failed_has_not_found_nothing(started: Any) -> None:
    tool = await started(provider="searxng", total_seconds=0.1)
    with pytest.raises(ToolFault, match=r"engines that it asks failed: \[\['bing', 'timeout'\]\]"):
        await text(tool, searched("broken"))


async def test_a_busy_provider_is_asked_again_as_it_wishes(started: Any, providers: Providers) -> None:
    tool = await started(total_seconds=20)
    providers.instead = [web.Response(status=429, headers={"retry-after": "1"}), web.Response(status=503)]
    assert await text(tool, searched(QUERY)) == FOUND
    assert len(providers.asked) == 3
    providers.instead = [web.Response(status=429, headers={"retry-after": "3600"})]
    with pytest.raises(ToolFault, match="it wishes to be left alone for 3600 s") as caught:
        await text(tool, searched("another"))
    assert caught.value.kind is FaultKind.OVERLOADED
    assert len(providers.asked) == 4, "it does not wait for an hour"


async def test_a_slow_or_absent_provider_is_a_fault_that_may_be_retried(started: Any, providers: Providers) -> None:
    tool = await started(timeout_seconds=0.1, total_seconds=0.3)
    providers.delay = 5.0
    with pytest.raises(ToolFault, match=r"no answer within 0.1 s") as caught:
        await text(tool, searched(QUERY))
    assert (caught.value.kind, caught.value.retryable) == (FaultKind.OVERLOADED, True)
    absent = await started(url="http://127.0.0.1:9", total_seconds=0.1)
    with pytest.raises(ToolFault, match="no connection") as caught:
        await text(absent, searched(QUERY))
    assert (caught.value.kind, caught.value.retryable) == (FaultKind.UNREACHABLE, True)


async def test_it_does_not_start_without_key_or_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*KEYS.values(), "BRAVE_SEARCH_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(StartError, match=r"serper needs a key; set the environment variable SERPER_API_KEY where"):
        await WebSearchTool().start()
    with pytest.raises(StartError, match="BRAVE_API_KEY or BRAVE_SEARCH_API_KEY"):
        await WebSearchTool(provider="brave").start()
    with pytest.raises(StartError, match="give the address of searxng as the option url"):
        await WebSearchTool(provider="searxng").start()
    with pytest.raises(ConfigError, match=r"option provider is 'altavista': .*'serper', 'brave'"):
        WebSearchTool(provider="altavista")
    with pytest.raises(ConfigError, match="give their folder as the option cache"):
        WebSearchTool(replay=True)


async def test_a_run_is_replayed_from_what_was_recorded(
    started: Any,
    providers: Providers,
    servers: LiveServers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = tmp_path / "answers"
    assert await text(await started(cache=cache), searched(QUERY)) == FOUND
    assert await text(await started(cache=cache), searched(QUERY)) == FOUND
    assert len(providers.asked) == 1, "the second server found it on disk"
    [file] = cache.glob("*/*.json")
    assert (json.loads(file.read_text())["request"]["query"], KEY in file.read_text()) == (QUERY, False)
    await providers.stop()
    monkeypatch.delenv("SERPER_API_KEY")
    live = await servers.start([WebSearchTool(cache=cache, replay=True)])
    async with ToolClient(live.url) as client:
        [known] = await client.step([StepRequest("t", searched(QUERY), 0)])
        [unknown] = await client.step([StepRequest("t", searched("another"), 1)])
    assert FOUND in known.observation
    assert (unknown.fault, "There is no recorded answer to this query." in unknown.observation) == (None, True)
    assert unknown.metrics is not None
    assert sum(value for name, value in unknown.metrics.items() if "not_recorded" in name) == 1.0
    assert 'no answer is recorded for {"count": 10' in caplog.text
    assert '"query": "another"' in caplog.text
    with pytest.raises(StartError, match="record answers into it first"):
        await WebSearchTool(cache=tmp_path / "none", replay=True).start()
