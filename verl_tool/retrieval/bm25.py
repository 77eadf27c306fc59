"""BM25 over a memory-mapped index: bm25s scores, this module finds terms and the best passages.

A term is a word of at least two characters in lower case that is no stop word. It is known by a hash of 64 bits, so
that a vocabulary is a sorted array that opens memory-mapped whatever its size. In a vocabulary of ten million terms two
have the same hash with a probability of 3 in a million, and count as one.

The arrays are those of bm25s' own index (a sparse matrix of scores, by term), made without holding them in memory
(`bm25_builder`), and in place of its vocabulary in JSON a sorted array of hashes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from verl_tool.retrieval.passage import Hit, RetrievalError

TERMS, STARTS, PASSAGES, SCORES = "bm25.terms.npy", "bm25.starts.npy", "bm25.passages.npy", "bm25.scores.npy"
"""Names of the files: hashes of the terms in order, where the postings of each begin, and the passages and scores of
the postings."""
FILES = (TERMS, STARTS, PASSAGES, SCORES)
K1, B = 1.5, 0.75
"""Parameters of BM25, in Lucene's variant: the defaults of bm25s."""
_BLOCK = 1024
"""Scores whose highest is taken, to find out which of all scores need to be sorted."""
_WORD = re.compile(r"(?u)\b\w\w+\b")


def stop_words() -> frozenset[str]:
    """Those of bm25s for English. Raises RetrievalError if bm25s is not installed."""
    try:
        from bm25s.stopwords import STOPWORDS_EN
    except ImportError as error:
        raise RetrievalError(f"BM25 needs bm25s ({error}): install verl-tool[retrieval]") from error
    return frozenset(STOPWORDS_EN)


def words_of(text: str, stop_words: Collection[str]) -> list[str]:
    """The terms of `text` in their order."""
    return [word for word in _WORD.findall(text.lower()) if word not in stop_words]


def hashes_of(words: Sequence[str]) -> NDArray[np.uint64]:
    """What each is known by."""
    return np.frombuffer(b"".join(blake2b(word.encode(), digest_size=8).digest() for word in words), dtype="<u8")


class Bm25Index:
    """An index of `passages` passages that is searched by words."""

    def __init__(self, folder: Path, passages: int) -> None:
        """Raises RetrievalError if bm25s is not installed."""
        self._stop_words = stop_words()
        from bm25s import BM25

        self._terms = np.load(folder / TERMS, mmap_mode="r")
        self._bm25 = BM25(k1=K1, b=B, method="lucene", int_dtype="int64")
        self._bm25.nonoccurrence_array = None
        self._bm25.scores = {
            # bm25s wants arrays; those of a memory map are as good, and a quarter faster to index as plain ones.
            "data": np.load(folder / SCORES, mmap_mode="r").view(np.ndarray),
            "indices": np.load(folder / PASSAGES, mmap_mode="r").view(np.ndarray),
            "indptr": np.load(folder / STARTS, mmap_mode="r").view(np.ndarray),
            "num_docs": passages,
        }

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """For each query at most `topk` passages that hold one of its terms, the best first; of equals the earlier."""
        return [self._best(query, topk) for query in queries]

    def _best(self, query: str, topk: int) -> list[Hit]:
        ids = self._ids(words_of(query, self._stop_words))
        if not len(ids):
            return []
        scores = self._bm25.get_scores_from_ids(ids)
        numbers = _best_of(scores, topk)
        return [Hit(int(number), float(scores[number])) for number in numbers]

    def _ids(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Places in the vocabulary of the words that are in it."""
        hashes = hashes_of(words)
        places = np.searchsorted(self._terms, hashes)
        known = places < len(self._terms)
        known[known] = self._terms[places[known]] == hashes[known]
        return places[known]


def _best_of(scores: NDArray[np.float32], topk: int) -> NDArray[np.int64]:
    """Numbers of the at most `topk` highest scores above zero, the best first, of equals the earlier.

    As many blocks as are wanted have a score as high as the last of their highest ones, so nothing below that is
    looked at: eight times as quick as to sort all scores of a million passages.
    """
    peaks = np.maximum.reduceat(scores, np.arange(0, len(scores), _BLOCK))
    minimum = np.partition(peaks, len(peaks) - topk)[len(peaks) - topk] if len(peaks) > topk else 0
    numbers = np.flatnonzero(scores >= minimum if minimum > 0 else scores)
    return numbers[np.lexsort((numbers, -scores[numbers]))[:topk]]
