"""Searches a corpus: ``<search>who painted it</search>``, or ``{"queries": […]}`` with several queries in one call.

The index is opened in this process (option ``index``), or there is a retrieval server (option ``url``). What the model
reads is what Search-R1's loop shows: ``Doc 1(Title: …) …`` on a line for each passage.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator

from verl_tool.client.exchange import TooLongError
from verl_tool.errors import StartError, ToolFault
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind
from verl_tool.retrieval.index import MAX_TOPK, Index
from verl_tool.retrieval.manifest import Manifest
from verl_tool.retrieval.passage import Passage, RetrievalError
from verl_tool.retrieval.search_batcher import SearchBatcher
from verl_tool.retrieval.wire import passages_of, request_of
from verl_tool.servers.tools._queries import QueryTool, joined_answers, queries_of
from verl_tool.servers.tools._service import RemoteService, ServiceRejectedError, base_url
from verl_tool.servers.tools.base import Context, ToolOptions, ToolResult

DEFAULT_URL = "http://127.0.0.1:8000/retrieve"
URL_VARIABLE, KEY_VARIABLE = "RETRIEVER_URL", "VERL_TOOL_RETRIEVAL_API_KEY"
"""Environment variables: the server's address if no option gives it, and its bearer token."""
NOTHING_FOUND = "No passage was found for this query."
MAX_REQUESTS = 1024
"""To a server at once, of each replica."""
PROBE_SECONDS = 30.0
"""A server that does not answer within this time when the tool starts is not there."""


class SearchRetrievalOptions(ToolOptions):
    index: Path | None = None
    """Folder of an index, to be opened in each replica."""
    embedder: str | None = None
    """Where the model of that index is, if not where it was built."""
    url: str | None = None
    """A retrieval server. Default: the variable RETRIEVER_URL, else port 8000 of this machine."""
    topk: int = Field(default=3, ge=1, le=MAX_TOPK)
    """Passages for each query."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """Of one search."""

    @model_validator(mode="after")
    def _one_place(self) -> SearchRetrievalOptions:
        if self.index is not None and self.url is not None:
            raise ValueError("index and url are two places to search; give one")
        if self.embedder is not None and self.index is None:
            raise ValueError("embedder is the model of an index; give index too")
        return self


class SearchRetrievalTool(QueryTool):
    """One searcher for all trajectories; their queries are searched together."""

    name = "search_retrieval"
    aliases = ("search",)
    description = "Searches a collection of texts and returns the passages that fit a query best."
    example_actions = (
        "<search>capital of France</search>",
        '<tool_call>\n{"name": "search", "arguments": {"queries": ["capital of France"]}}\n</tool_call>',
        '<tool_call>\n{"name": "search_retrieval", "arguments": {"query": "capital of France"}}\n</tool_call>',
    )
    Options = SearchRetrievalOptions
    options: SearchRetrievalOptions
    _searcher: RetrievalServer | OpenIndex | None = None

    async def start(self) -> None:
        """Open the index, or see that the server answers. Raises VerlToolError with what to do."""
        if self.options.index is not None:
            index = await asyncio.to_thread(Index, self.options.index, self.options.embedder)
            self._searcher = OpenIndex(index, self.options.timeout_seconds)
        else:
            self._searcher = await self._answering()

    async def check_needs(self) -> None:
        """See that the index is complete, or that the server answers. Raises VerlToolError with what to do."""
        if self.options.index is not None:
            Manifest.load(self.options.index)
        else:
            await (await self._answering()).close()

    async def _answering(self) -> RetrievalServer:
        """The server. Raises StartError if it does not answer."""
        url = self.options.url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        server = RetrievalServer(url, os.environ.get(KEY_VARIABLE), self.options.timeout_seconds)
        try:
            await asyncio.wait_for(server.search(["test"], 1), PROBE_SECONDS)
        except (ToolFault, asyncio.TimeoutError) as error:
            await server.close()
            raise StartError(
                f"search_retrieval: {error or f'no answer of {url} in {PROBE_SECONDS:g} s'}; start a server with "
                "python -m verl_tool.retrieval serve --index DIR, or set its option url or index in --tool_config, or "
                f"{URL_VARIABLE}"
            ) from error
        return server

    async def close(self) -> None:
        if self._searcher is not None:
            await self._searcher.close()

    async def check(self) -> None:
        """Raises RetrievalError if the index is gone. A server that is away fails the calls of that time only."""
        if isinstance(self._searcher, OpenIndex):
            self._searcher.index.check()

    async def run(self, call: Call, context: Context) -> ToolResult:
        queries = queries_of(call)
        began = time.perf_counter()
        found = await self._search(queries)
        metrics = {
            "queries": float(len(queries)),
            "passages": float(sum(map(len, found))),
            "search_seconds": time.perf_counter() - began,
        }
        return ToolResult(observation(queries, found), metrics=metrics)

    async def _search(self, queries: Sequence[str]) -> list[list[Passage]]:
        """Raises ToolFault if the retriever fails: a model must never read that there is nothing."""
        if self._searcher is None:
            raise ToolFault(FaultKind.UNREACHABLE, "search_retrieval has not been started", retryable=True)
        try:
            return await self._searcher.search(queries, self.options.topk)
        except RetrievalError as error:
            raise ToolFault(FaultKind.UNREACHABLE, str(error), retryable=True) from error


class RetrievalServer:
    """A server over HTTP. `url`: with or without ``/retrieve``. `seconds`: of one search."""

    def __init__(self, url: str, api_key: str | None, seconds: float) -> None:
        """Raises ConfigError if `url` is none."""
        base = base_url("search_retrieval", url).removesuffix("/retrieve")
        settings = f"the option url, or {URL_VARIABLE}, and {KEY_VARIABLE}"
        self._service = RemoteService("the retriever", base, api_key, MAX_REQUESTS, seconds, settings=settings)
        self._seconds = seconds

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Passages for each query, the best first. Raises ToolFault if it fails."""
        try:
            answer = await self._service.ask("POST", "/retrieve", request_of(queries, topk), self._seconds)
            return passages_of(answer, len(queries))
        except ValueError as error:
            raise self._service.malformed(error) from error
        except (ServiceRejectedError, TooLongError) as error:
            words = f"the retriever at {self._service.url} refuses a search: {error or 'its answer is too long'}"
            raise ToolFault(FaultKind.UNREACHABLE, words, retryable=False) from error

    async def close(self) -> None:
        await self._service.close()


class OpenIndex:
    """An index that is open in this process."""

    def __init__(self, index: Index, seconds: float) -> None:
        self.index = index
        self._seconds = seconds
        self._batcher = SearchBatcher(index)

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        try:
            found = await asyncio.wait_for(self._batcher.search(queries, topk), self._seconds)
        except asyncio.TimeoutError:
            # Queries are short, so that no model brings this about.
            words = f"no answer of the index within {self._seconds:g} s (timeout_seconds)"
            raise ToolFault(FaultKind.OVERLOADED, words, retryable=True) from None
        return [[Passage(**json.loads(hit.line)) for hit in hits] for hits in found]

    async def close(self) -> None:
        await self._batcher.close()


def observation(queries: Sequence[str], found: Sequence[Sequence[Passage]]) -> str:
    """What the model reads. Of several queries, each stands before its passages."""
    return joined_answers(queries, [_as_text(passages) for passages in found])


def _as_text(passages: Sequence[Passage]) -> str:
    lines = [f"Doc {number}(Title: {each.title}) {each.text}" for number, each in enumerate(passages, 1)]
    return "\n".join(lines) or NOTHING_FOUND
