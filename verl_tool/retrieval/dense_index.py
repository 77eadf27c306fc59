"""Search by vectors: all of them (flat), or an approximate index of faiss (HNSW, IVF)."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_tool.retrieval.passage import Hit, RetrievalError

VECTORS, INDEX, LISTS = "dense.vectors", "dense.faiss", "dense.lists"
"""Names of the files: vectors as 32-bit floats one after the other; an index of faiss; the lists of an IVF index."""
VECTORS_AT_A_TIME = 100_000
"""That an index takes in at a time."""
HNSW_NEIGHBOURS, HNSW_BUILD, HNSW_SEARCH = 32, 100, 128
"""Neighbours of a vector, and how many candidates are kept while it is added and while it is looked for."""
IVF_TRAINING = 64
"""Vectors for each list from which the lists are learnt."""
IVF_PROBED = 16
"""One list of so many is searched, and at least 8."""
_MATRIX_QUERIES, _MATRIX_VECTORS = 4, 1 << 14
"""From so many queries on, a flat search multiplies matrices of queries and of so many vectors. By itself, faiss 1.15
compares up to 128,000 queries one by one, which takes a batch of 64 five times as long."""
_SHARDS = "dense.shards"


class DenseKind(str, Enum):
    flat = "flat"
    hnsw = "hnsw"
    ivf = "ivf"


FILES = {DenseKind.flat: (VECTORS,), DenseKind.hnsw: (INDEX,), DenseKind.ivf: (INDEX, LISTS)}
"""What an index of each kind consists of."""


def faiss() -> Any:
    """The library, set up for batches of queries. Raises RetrievalError if it is not installed."""
    try:
        import faiss as library
    except ImportError as error:
        raise RetrievalError(f"dense retrieval needs faiss ({error}): install verl-tool[retrieval]") from error
    library.cvar.distance_compute_blas_threshold = _MATRIX_QUERIES
    library.cvar.distance_compute_blas_database_bs = _MATRIX_VECTORS
    return library


class DenseIndex:
    """An index of vectors with `dimensions` numbers, memory-mapped."""

    def __init__(self, folder: Path, kind: DenseKind, dimensions: int) -> None:
        """Raises RetrievalError if faiss is not installed."""
        self._faiss = faiss()
        self._vectors: NDArray[np.float32] | None = None
        if kind == DenseKind.flat:
            self._vectors = open_vectors(folder, dimensions)
        else:
            flags = self._faiss.IO_FLAG_MMAP_IFC if kind == DenseKind.hnsw else self._faiss.IO_FLAG_ONDISK_SAME_DIR
            self._index = self._faiss.read_index(str(folder / INDEX), flags)

    def search(self, queries: NDArray[np.float32], topk: int) -> list[list[Hit]]:
        """For each query the `topk` passages with the largest inner product, the best first."""
        if self._vectors is not None:
            metric = self._faiss.METRIC_INNER_PRODUCT
            scores, numbers = self._faiss.knn(queries, self._vectors, min(topk, len(self._vectors)), metric=metric)
        else:
            scores, numbers = self._index.search(queries, min(topk, self._index.ntotal))
        return [
            [Hit(number, score) for number, score in zip(*row, strict=True) if number >= 0]
            for row in zip(numbers.tolist(), scores.tolist(), strict=True)
        ]


def open_vectors(folder: Path, dimensions: int) -> NDArray[np.float32]:
    """The vectors, ``[passages, dimensions]``, memory-mapped."""
    return np.memmap(folder / VECTORS, np.float32, "r").reshape(-1, dimensions)


def build_index(folder: Path, kind: DenseKind, dimensions: int, on_progress: Callable[[float], None]) -> None:
    """Make an index from the vectors of `folder`, which are then deleted. `on_progress` gets shares of the whole.

    An HNSW index is held in memory while it is made, with its vectors; an IVF index is not.
    """
    vectors = open_vectors(folder, dimensions)
    draft = folder / f"{INDEX}.draft"
    if kind == DenseKind.hnsw:
        faiss().write_index(_hnsw(vectors, on_progress), str(draft))
    elif kind == DenseKind.ivf:
        _write_ivf(folder, vectors, draft, on_progress)
    else:
        return
    os.replace(draft, folder / INDEX)
    (folder / VECTORS).unlink()


def _hnsw(vectors: NDArray[np.float32], on_progress: Callable[[float], None]) -> Any:
    library = faiss()
    index = library.IndexHNSWFlat(vectors.shape[1], HNSW_NEIGHBOURS, library.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction, index.hnsw.efSearch = HNSW_BUILD, HNSW_SEARCH
    for _, block, share in _blocks(vectors):
        index.add(block)
        on_progress(share)
    return index


def _write_ivf(folder: Path, vectors: NDArray[np.float32], draft: Path, on_progress: Callable[[float], None]) -> None:
    """Lists are learnt from a sample, filled block by block into files, and these joined on disk."""
    library = faiss()
    from faiss.contrib.ondisk import merge_ondisk

    count, dimensions = vectors.shape
    lists = max(1, min(int(4 * math.sqrt(count)), count // IVF_TRAINING))
    index = library.IndexIVFFlat(library.IndexFlatIP(dimensions), dimensions, lists, library.METRIC_INNER_PRODUCT)
    index.nprobe = min(lists, max(8, lists // IVF_PROBED))
    sample = np.random.default_rng(0).choice(count, min(count, lists * IVF_TRAINING), replace=False)
    index.train(vectors[np.sort(sample)])
    shards = folder / _SHARDS
    shutil.rmtree(shards, ignore_errors=True)
    shards.mkdir()
    library.write_index(index, str(shards / "trained"))
    names = []
    for first, block, share in _blocks(vectors):
        shard = library.read_index(str(shards / "trained"))
        shard.add_with_ids(block, np.arange(first, first + len(block)))
        names.append(str(shards / str(first)))
        library.write_index(shard, names[-1])
        on_progress(0.9 * share)
    merge_ondisk(index, names, str(folder / LISTS))
    library.write_index(index, str(draft))
    shutil.rmtree(shards)
    on_progress(1.0)


def _blocks(vectors: NDArray[np.float32]) -> Iterator[tuple[int, NDArray[np.float32], float]]:
    """Blocks of the vectors: number of the first, the block, and the share of all behind it."""
    for first in range(0, len(vectors), VECTORS_AT_A_TIME):
        block = np.ascontiguousarray(vectors[first : first + VECTORS_AT_A_TIME])
        yield first, block, (first + len(block)) / len(vectors)
