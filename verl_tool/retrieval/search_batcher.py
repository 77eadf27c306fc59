"""Queries that are asked at the same time are searched together: vectors and embeddings cost least in large batches.

While one batch is searched, the next gathers. So nothing waits where little is asked, and a batch is as large as what
came in the meantime. Those who were answered ask again a moment later: a batch waits for them, for at most 5% of the
time that the last one took.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from verl_tool.retrieval.index import Index
from verl_tool.retrieval.passage import RetrievalError

MAX_BATCH = 256
"""Queries that are searched together; one request with more is searched by itself."""
_GATHER_SHARE = 0.05


class SearchResult(NamedTuple):
    line: bytes
    """The passage as JSON: ``{"id": …, "contents": …}``."""
    score: float


@dataclass(eq=False)
class _Request:
    queries: Sequence[str]
    topk: int
    answer: asyncio.Future[list[list[SearchResult]]]


class SearchBatcher:
    """Searches an index from one event loop, in a thread of its own.

    `on_batch` is told how many queries a batch had, and the seconds that it took.
    """

    def __init__(
        self, index: Index, *, max_batch: int = MAX_BATCH, on_batch: Callable[[int, float], None] | None = None
    ) -> None:
        self.index = index
        self._max_batch = max_batch
        self._on_batch = on_batch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._waiting: deque[_Request] = deque()
        self._gathered = asyncio.Event()
        """As many queries wait as the last batch had."""
        self._last_batch = 0
        self._searching: asyncio.Task[None] | None = None
        self._closed = False
        self.queued = 0
        """Queries that wait for a batch."""

    async def search(self, queries: Sequence[str], topk: int) -> list[list[SearchResult]]:
        """For each query at most `topk` passages, the best first. `topk` as in `Index.search`. Raises RetrievalError if
        the search failed."""
        if self._closed:
            raise RetrievalError("the index is closed")
        request = _Request(queries, topk, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self.queued += len(queries)
        if self.queued >= self._last_batch:
            self._gathered.set()
        if self._searching is None:
            self._searching = asyncio.create_task(self._search_all())
        return await request.answer

    async def close(self) -> None:
        """End what is searched; what waits gets a RetrievalError."""
        self._closed = True
        for request in self._waiting:
            if not request.answer.done():
                request.answer.set_exception(RetrievalError("the index is closed"))
        self._waiting.clear()
        self.queued = 0
        self._gathered.set()
        if self._searching is not None:
            await self._searching
        self._thread.shutdown()

    async def _search_all(self) -> None:
        try:
            while batch := self._next_batch():
                began = time.perf_counter()
                await self._search_one(batch)
                seconds = time.perf_counter() - began
                self._last_batch = sum(len(request.queries) for request in batch)
                if self._on_batch is not None:
                    self._on_batch(self._last_batch, seconds)
                await self._gather(_GATHER_SHARE * seconds)
        finally:
            self._searching = None

    async def _gather(self, seconds: float) -> None:
        self._gathered.clear()
        if self.queued < min(self._last_batch, self._max_batch):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._gathered.wait(), seconds)

    def _next_batch(self) -> list[_Request]:
        """What is searched together, without those whose client has left."""
        batch: list[_Request] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0].queries) <= self._max_batch):
            request = self._waiting.popleft()
            self.queued -= len(request.queries)
            if not request.answer.done():
                batch.append(request)
                size += len(request.queries)
        return batch

    async def _search_one(self, batch: list[_Request]) -> None:
        queries = [query for request in batch for query in request.queries]
        topk = max(request.topk for request in batch)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._found, queries, topk)
        except Exception as error:  # noqa: BLE001  # whoever asked is told, whatever a library raised
            for request in batch:
                if not request.answer.done():
                    request.answer.set_exception(RetrievalError(f"the search failed: {error!r}"))
            return
        first = 0
        for request in batch:
            of_request = found[first : first + len(request.queries)]
            first += len(request.queries)
            if not request.answer.done():
                request.answer.set_result([hits[: request.topk] for hits in of_request])

    def _found(self, queries: Sequence[str], topk: int) -> list[list[SearchResult]]:
        """In the thread: passages are read from the disk there too."""
        line = self.index.line
        return [
            [SearchResult(line(hit.number), hit.score) for hit in hits] for hits in self.index.search(queries, topk)
        ]
