"""An index, opened memory-mapped and searched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl_tool.retrieval.bm25 import Bm25Index
from verl_tool.retrieval.dense_index import DenseIndex
from verl_tool.retrieval.embedder import load_embedder, probe
from verl_tool.retrieval.fusion import reciprocal_rank_fusion
from verl_tool.retrieval.manifest import Manifest
from verl_tool.retrieval.passage import Hit, Passage, RetrievalError
from verl_tool.retrieval.passage_store import PassageStore

MAX_TOPK = 100
"""The most passages that a query can ask for."""
_PROBE_TOLERANCE = 0.02
"""Of the numbers of a probe: a model gives other last digits on another machine, another model other numbers."""


class Index:
    """An index in `folder`. Several threads may search it at the same time.

    `embedder`: where the model is, if not where it was when the index was built.
    """

    def __init__(self, folder: Path, embedder: str | None = None) -> None:
        """Raises RetrievalError if the index is not complete, or a library or the embedder it was built with is not
        there."""
        self._folder = folder
        self.manifest = Manifest.load(folder)
        settings = self.manifest.settings
        self._store = PassageStore(folder)
        self._bm25 = Bm25Index(folder, len(self._store)) if settings.kind.by_words else None
        self._dense: DenseIndex | None = None
        if settings.kind.by_vectors:
            self._embedder = load_embedder(embedder or settings.embedder)
            self._check_embedder(embedder or settings.embedder)
            self._dense = DenseIndex(folder, settings.dense, self._embedder.dimensions)

    def __len__(self) -> int:
        return len(self._store)

    def check(self) -> None:
        """Raises RetrievalError if its files are not there any more."""
        Manifest.load(self._folder)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most `topk` passages for each query, best first. Raises ValueError unless 1 <= `topk` <= `MAX_TOPK`."""
        if not 1 <= topk <= MAX_TOPK:
            raise ValueError(f"topk is {topk}; it must be from 1 to {MAX_TOPK}")
        if not queries:
            return []
        # What is fused does not depend on how many of it are wanted.
        depth = topk if self._bm25 is None or self._dense is None else MAX_TOPK
        rankings = []
        if self._bm25 is not None:
            rankings.append(self._bm25.search(queries, depth))
        if self._dense is not None:
            rankings.append(self._dense.search(self._embedder.queries(queries), depth))
        if len(rankings) == 1:
            return rankings[0]
        return [reciprocal_rank_fusion(of_query, topk) for of_query in zip(*rankings, strict=True)]

    def passage(self, number: int) -> Passage:
        return self._store[number]

    def line(self, number: int) -> bytes:
        """The passage of a hit as JSON: ``{"id": …, "contents": …}``."""
        return self._store.line(number)

    def _check_embedder(self, name: str) -> None:
        built = self.manifest
        if self._embedder.dimensions != built.dimensions:
            found = f"gives {self._embedder.dimensions} numbers a text, and the index has {built.dimensions}"
        elif built.probe is not None and not np.allclose(probe(self._embedder), built.probe, atol=_PROBE_TOLERANCE):
            found = "gives other vectors than the model with which the index was built"
        else:
            return
        raise RetrievalError(f"the embedder {name!r} {found}; give that model with --embedder, or rebuild the index")
