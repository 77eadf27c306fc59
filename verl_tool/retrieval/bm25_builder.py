"""Building a BM25 index of any size in bounded memory.

While the corpus is read, the postings of some ten thousand passages at a time are sorted by term and written to a part
(`write_part`). At the end the parts are merged, one range of terms after the other (`merge_parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from verl_tool.retrieval.bm25 import K1, PASSAGES, SCORES, STARTS, TERMS, B, hashes_of, words_of
from verl_tool.retrieval.passage import RetrievalError

PARTS = "bm25.parts"
"""Name of the folder of parts, which is there only while the index is built."""
POSTINGS_AT_A_TIME = 16 << 20
"""Postings that are merged at a time, unless one term has more; about 40 bytes of memory each."""
_TERMS_AT_A_TIME = 4 << 20
"""Terms of parts that are gathered before they are united with those known."""
_SMALL_BYTES = 4096
_ARRAYS = ("terms", "starts", "passages", "counts", "lengths")


@dataclass(frozen=True)
class _Part:
    """Postings of a range of passages, memory-mapped."""

    terms: NDArray[np.uint64]
    """Hashes of its terms, in order."""
    starts: NDArray[np.int64]
    """Where the postings of each term begin, and behind the last one where they end."""
    passages: NDArray[np.int32]
    counts: NDArray[np.float32]
    """How often the passage of a posting holds the term."""
    lengths: NDArray[np.int32]
    """Terms of each passage of the range."""


def write_part(folder: Path, number: int, texts: Sequence[str], first: int, stop_words: Collection[str]) -> None:
    """Write part `number`: the postings of `texts`, whose passages are numbered from `first`."""
    seen: dict[str, int] = {}
    ids: list[int] = []
    lengths = np.empty(len(texts), np.int32)
    for place, text in enumerate(texts):
        words = words_of(text, stop_words)
        lengths[place] = len(words)
        ids += [seen.setdefault(word, len(seen)) for word in words]
    terms, rank = _ranked(hashes_of(list(seen)))
    passages = np.repeat(np.arange(first, first + len(texts)), lengths)
    # A term and a passage as one number, in the order of the postings.
    keys = rank[ids] * np.int64(len(texts)) + (passages - first)
    postings, counts = np.unique(keys, return_counts=True)
    by_term = postings // len(texts)
    part = _Part(
        terms,
        np.searchsorted(by_term, np.arange(len(terms) + 1)),
        (postings % len(texts) + first).astype(np.int32),
        counts.astype(np.float32),
        lengths,
    )
    (folder / PARTS).mkdir(exist_ok=True)
    for name in _ARRAYS:
        np.save(_path(folder, number, name), getattr(part, name))


def merge_parts(folder: Path, parts: int, on_progress: Callable[[float], None]) -> tuple[int, int]:
    """Write the index from so many parts; how many terms and postings it has. `on_progress` gets shares of the whole.
    Raises RetrievalError if no passage has a term."""
    loaded = [_load(folder, number) for number in range(parts)]
    terms, frequencies = _vocabulary(loaded)
    if not len(terms):
        raise RetrievalError("no passage holds a word that could be searched for; BM25 has nothing to index")
    starts = np.concatenate([[0], np.cumsum(frequencies)])
    lengths = np.concatenate([part.lengths for part in loaded])
    idf = np.log(1 + (len(lengths) - frequencies + 0.5) / (frequencies + 0.5))
    norms = (K1 * (1 - B + B * lengths / lengths.mean())).astype(np.float32)
    np.save(folder / TERMS, terms)
    np.save(folder / STARTS, starts)
    total = int(starts[-1])
    passages = open_memmap(folder / PASSAGES, "w+", np.int32, (total,))
    scores = open_memmap(folder / SCORES, "w+", np.float32, (total,))
    for first, end in _ranges(starts):
        ids, found, counts = _postings(loaded, terms, first, end)
        place = slice(int(starts[first]), int(starts[end]))
        passages[place] = found
        scores[place] = (idf[first:end].astype(np.float32))[ids] * (counts / (norms[found] + counts))
        on_progress(place.stop / total)
    passages.flush()
    scores.flush()
    return len(terms), total


def _ranked(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The different hashes in order, and the place of each of `hashes` among them."""
    terms, rank = np.unique(hashes, return_inverse=True)
    return terms, rank.astype(np.int64)


def _path(folder: Path, number: int, name: str) -> Path:
    return folder / PARTS / f"{number:06}.{name}.npy"


def _load(folder: Path, number: int) -> _Part:
    return _Part(*(_mapped(_path(folder, number, name)) for name in _ARRAYS))


def _mapped(path: Path) -> NDArray[Any]:
    """The array of a file, memory-mapped unless it is small: an empty one cannot be."""
    array: NDArray[Any] = np.load(path, mmap_mode="r" if path.stat().st_size > _SMALL_BYTES else None)
    return array


def _vocabulary(parts: Sequence[_Part]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """All terms in order, and in how many passages each is."""
    terms, frequencies = np.empty(0, np.uint64), np.empty(0, np.int64)
    waiting: list[_Part] = []
    for number, part in enumerate(parts, 1):
        waiting.append(part)
        if number == len(parts) or sum(len(p.terms) for p in waiting) > max(_TERMS_AT_A_TIME, len(terms)):
            every = np.concatenate([terms, *(p.terms for p in waiting)])
            counts = np.concatenate([frequencies, *(np.diff(p.starts) for p in waiting)])
            terms, place = np.unique(every, return_inverse=True)
            frequencies = np.zeros(len(terms), np.int64)
            np.add.at(frequencies, place, counts)
            waiting = []
    return terms, frequencies


def _ranges(starts: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of terms with at most `POSTINGS_AT_A_TIME` postings, and at least one term."""
    first, terms = 0, len(starts) - 1
    while first < terms:
        end = int(np.searchsorted(starts, starts[first] + POSTINGS_AT_A_TIME, side="right")) - 1
        yield first, max(end, first + 1)
        first = max(end, first + 1)


def _postings(
    parts: Sequence[_Part], terms: NDArray[np.uint64], first: int, end: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Of the terms from `first` to `end`: term (0 for `first`), passage and count of each posting, in that order."""
    ids, passages, counts = [], [], []
    for part in parts:
        begin, stop = np.searchsorted(part.terms, terms[[first, end - 1]], side="left")
        stop += int(stop < len(part.terms) and part.terms[stop] == terms[end - 1])
        starts = part.starts[begin : stop + 1]
        if begin < stop:
            places = np.searchsorted(terms[first:end], part.terms[begin:stop])
            ids.append(np.repeat(places, np.diff(starts)))
            passages.append(part.passages[starts[0] : starts[-1]])
            counts.append(part.counts[starts[0] : starts[-1]])
    every = np.concatenate(ids)
    # The parts are in the order of their passages.
    order = np.argsort(every, kind="stable")
    return every[order], np.concatenate(passages)[order], np.concatenate(counts)[order]
