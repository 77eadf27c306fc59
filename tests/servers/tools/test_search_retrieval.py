"""The search tool: over an index in its process, over a real server, and over servers that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from actions import results, text
from live_server import LiveServers, serve_asgi
from small_corpus import PAGES, build_index, write_corpus
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError, StartError, ToolFault
from verl_tool.formats import HERMES, SEARCH_TAGS
from verl_tool.protocol import FaultKind, StepRequest
from verl_tool.retrieval.index import Index
from verl_tool.retrieval.manifest import Kind
from verl_tool.retrieval.passage import RetrievalError
from verl_tool.retrieval.serving.retrieval_app import RetrievalApp
from verl_tool.retrieval.serving.settings import RetrievalSettings
from verl_tool.servers.tests.live_check import run_cases
from verl_tool.servers.tests.test_search_retrieval_tool import CASES
from verl_tool.servers.tools import tool_class
from verl_tool.servers.tools.search_retrieval import (
    KEY_VARIABLE,
    NOTHING_FOUND,
    URL_VARIABLE,
    SearchRetrievalTool,
)

QUERY = "Who painted the harbour of Sandmouth?"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    folder = tmp_path_factory.mktemp("indexes")
    corpus = write_corpus(folder / "pages.jsonl")
    for kind in (Kind.bm25, Kind.hybrid):
        build_index(corpus, folder / kind.value, kind)
    return {kind: folder / kind.value for kind in (Kind.bm25, Kind.hybrid)}


@pytest.fixture
async def started() -> AsyncIterator[Any]:
    tools: list[SearchRetrievalTool] = []

    async def start(**options: Any) -> SearchRetrievalTool:
        tools.append(SearchRetrievalTool(**options))
        await tools[-1].start()
        return tools[-1]

    yield start
    for tool in tools:
        await tool.close()


@pytest.fixture
async def served() -> AsyncIterator[Any]:
    """Serves an application; its URL."""
    running = []

    async def start(app: Any) -> str:
        url, server, task = await serve_asgi(app)
        running.append((server, task))
        return url

    yield start
    for server, task in running:
        server.should_exit = True
        await task


def search_r1_text(titles: list[str]) -> str:
    return "\n".join(f'Doc {i}(Title: "{title}") {PAGES[title]}' for i, title in enumerate(titles, 1))


async def test_what_is_found_is_shown_as_search_r1_does(started: Any, folders: dict[Kind, Path]) -> None:
    tool = await started(index=folders[Kind.bm25], topk=2)
    [call] = tool.recognise(f"<think>I look it up.</think> <search> {QUERY} </search>")
    found = await tool.run(call, None)
    wanted = search_r1_text(["Mira Tolk", "Sandmouth"])
    assert (found.text, found.valid, found.metrics["passages"]) == (wanted, True, 2.0)
    assert call.format is SEARCH_TAGS
    assert call.format.render(found.text, call) == f"\n\n<information>{wanted}</information>\n\n"


@pytest.mark.parametrize(
    "arguments", [{"query": QUERY}, {"queries": [QUERY]}, {"query_list": [QUERY]}, {"input": QUERY}]
)
@pytest.mark.parametrize("name", ["search", "search_retrieval"])
async def test_hermes_calls_have_the_same_answer(
    name: str, arguments: dict[str, Any], started: Any, folders: dict[Kind, Path]
) -> None:
    tool = await started(index=folders[Kind.bm25], topk=1)
    action = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    assert tool.recognise(action)[0].format is HERMES
    assert await text(tool, action) == search_r1_text(["Mira Tolk"])


async def test_several_queries_are_answered_each_under_its_name(started: Any, folders: dict[Kind, Path]) -> None:
    tool = await started(index=folders[Kind.bm25], topk=1)
    call = {"name": "search", "arguments": {"queries": ["Lome sea", "zzz", "castle sheep"]}}
    assert await text(tool, f"<tool_call>{json.dumps(call)}</tool_call>") == (
        f"Query: Lome sea\n{search_r1_text(['Lome'])}\n\n"
        f"Query: zzz\n{NOTHING_FOUND}\n\n"
        f"Query: castle sheep\n{search_r1_text(['Grey Hills'])}"
    )


async def test_nothing_found_is_told_and_never_empty(started: Any, folders: dict[Kind, Path]) -> None:
    [result] = await results(await started(index=folders[Kind.bm25]), "<search>zzz</search>")
    assert (result.text, result.valid, result.metrics["passages"]) == (NOTHING_FOUND, True, 0.0)


@pytest.mark.parametrize("by_url", [False, True])
async def test_the_live_check_holds(
    by_url: bool, servers: LiveServers, served: Any, folders: dict[Kind, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"index": folders[Kind.hybrid]}
    if by_url:
        app = RetrievalApp(Index(folders[Kind.hybrid]), RetrievalSettings(index="here", api_key="s3cret"))
        options = {}
        monkeypatch.setenv(URL_VARIABLE, await served(app))
        monkeypatch.setenv(KEY_VARIABLE, "s3cret")
    live = await servers.start([tool_class("search")(**options)])
    outcomes = await run_cases(live.observations_url, None, "search_retrieval", CASES)
    assert {outcome.case.name: outcome.problem for outcome in outcomes if outcome.problem} == {}
    if by_url:
        await app.searcher.close()


class Retriever:
    """A server that answers as it is told to, once the tool has started."""

    def __init__(self) -> None:
        self.response: Response | None = Response(b'{"result":[[]]}')
        self.asked: list[Any] = []

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/retrieve", self._retrieve, methods=["POST"])])

    async def _retrieve(self, request: Request) -> Response:
        self.asked.append(await request.json())
        if self.response is None:
            await asyncio.sleep(20)
        return self.response or Response()


@pytest.mark.parametrize(
    ("response", "kind", "retryable", "words"),
    [
        (PlainTextResponse("boom", 500), FaultKind.UNREACHABLE, True, "HTTP 500: boom"),
        (PlainTextResponse("later", 503), FaultKind.OVERLOADED, True, "HTTP 503: later"),
        (
            PlainTextResponse("key", 401),
            FaultKind.MISCONFIGURED,
            False,
            "HTTP 401: key; see to the option url, or RETRI",
        ),
        (PlainTextResponse("what", 400), FaultKind.UNREACHABLE, False, "refuses a search: HTTP 400: what"),
        (
            PlainTextResponse("<html>"),
            FaultKind.UNREACHABLE,
            True,
            "an answer of another form than the retriever's: <html>",
        ),
        (Response(b'{"result":[]}'), FaultKind.UNREACHABLE, True, "it must be a list of 1, one for each query"),
        (Response(b'{"result":[[{"id":"1"}]]}'), FaultKind.UNREACHABLE, True, "must have a text 'contents'"),
        (Response(b'{"result":[{"contents":"a"}]}'), FaultKind.UNREACHABLE, True, "it must be a list"),
        (None, FaultKind.OVERLOADED, True, "no answer within 0.3 s"),
    ],
)
async def test_a_retriever_that_fails_is_a_fault_that_no_model_reads(
    response: Response | None, kind: FaultKind, retryable: bool, words: str, started: Any, served: Any
) -> None:
    retriever = Retriever()
    tool = await started(url=await served(retriever.app()), timeout_seconds=0.3)
    retriever.response = response
    with pytest.raises(ToolFault) as caught:
        await text(tool, f"<search>{QUERY}</search>")
    assert (caught.value.kind, caught.value.retryable) == (kind, retryable)
    assert words in caught.value.message
    assert not kind.provokable
    assert retriever.asked[-1] == {"queries": [QUERY], "topk": 3, "return_scores": True}


async def test_through_a_tool_server_it_is_a_fault_of_the_step_and_an_answer_once_the_retriever_is_back(
    servers: LiveServers, served: Any
) -> None:
    retriever = Retriever()
    live = await servers.start([SearchRetrievalTool(url=await served(retriever.app()))])
    retriever.response = PlainTextResponse("boom", 401)
    async with ToolClient(live.url) as client:
        [failed] = await client.step([StepRequest("t", "<search>a</search>", 0)])
        assert (failed.observation, failed.fault and failed.fault.kind) == ("", FaultKind.MISCONFIGURED)
        retriever.response = Response(b'{"result":[[{"document":{"id":1,"contents":"A\\nb"},"score":1}]]}')
        [good] = await client.step([StepRequest("u", "<search>a</search>", 0)])
    assert good.observation == "\n\n<information>Doc 1(Title: A) b</information>\n\n"


async def test_documents_without_scores_are_read_too(started: Any, served: Any) -> None:
    retriever = Retriever()
    tool = await started(url=f"{await served(retriever.app())}/retrieve")
    retriever.response = Response(b'{"result":[[{"id":"1","contents":"A\\nb","title":"A"}]]}')
    assert await text(tool, "<search>a</search>") == "Doc 1(Title: A) b"


async def test_it_does_not_start_without_a_place_to_search(started: Any, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no connection: .*verl_tool\.retrieval serve --index DIR, or set its option"):
        await started(url="http://127.0.0.1:9")
    with pytest.raises(RetrievalError, match="there is no index in"):
        await started(index=tmp_path)
    with pytest.raises(ConfigError, match="option url is 'localhost'; give an address"):
        await started(url="localhost")
    with pytest.raises(ConfigError, match="index and url are two places"):
        SearchRetrievalTool(index=tmp_path, url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="embedder is the model of an index"):
        SearchRetrievalTool(embedder="x")


async def test_what_it_needs_is_looked_for_without_a_start(
    served: Any, tmp_path: Path, folders: dict[Kind, Path]
) -> None:
    await SearchRetrievalTool(index=folders[Kind.bm25]).check_needs()
    await SearchRetrievalTool(url=await served(Retriever().app())).check_needs()
    with pytest.raises(RetrievalError, match="there is no index in"):
        await SearchRetrievalTool(index=tmp_path).check_needs()
    with pytest.raises(StartError, match=r"no connection: .*or RETRIEVER_URL"):
        await SearchRetrievalTool(url="http://127.0.0.1:9").check_needs()


async def test_an_index_that_is_gone_makes_its_replica_unwell(
    started: Any, tmp_path: Path, folders: dict[Kind, Path]
) -> None:
    folder = tmp_path / "index"
    build_index(write_corpus(tmp_path / "c.jsonl"), folder, Kind.bm25)
    tool = await started(index=folder)
    await tool.check()
    (folder / "manifest.json").unlink()
    with pytest.raises(RetrievalError, match="there is no index"):
        await tool.check()
