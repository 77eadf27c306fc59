"""Building an index, stage by stage. What was stopped goes on where it was when it is built again."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from verl_tool.retrieval import bm25, dense_index, passage_store
from verl_tool.retrieval.bm25_builder import PARTS, merge_parts, write_part
from verl_tool.retrieval.corpus import Corpus
from verl_tool.retrieval.embedder import Embedder, load_embedder, probe
from verl_tool.retrieval.manifest import MANIFEST, STATE, BuildSettings, BuildState, Manifest, record_files
from verl_tool.retrieval.passage import Passage, RetrievalError
from verl_tool.retrieval.passage_store import PassageStore, PassageWriter

PASSAGES_AT_A_TIME = 20_000
"""Passages that are read before they are written, and a part of the BM25 index with them."""
CHARACTERS_AT_A_TIME = 32 << 20
"""Of their contents, if that comes first."""
EMBEDDED_AT_A_TIME = 2048
READING, MERGING, EMBEDDING, HASHING = "reading", "merging postings", "embedding", "hashing"
"""Names of stages; an HNSW or IVF index has one of its own besides."""
_LOCK = "build.lock"

OnProgress = Callable[[str, float], None]
"""Is told a stage, and which share of it is done."""


def build(settings: BuildSettings, folder: Path, on_progress: OnProgress) -> Manifest:
    """Build an index in `folder`, or go on with it; one that is complete is left as it is.

    Memory: some hundred megabytes, 8 bytes a passage and 16 a term, and what an HNSW index and the embedder take.

    Raises RetrievalError if the corpus cannot be read, the folder holds something else, or a library is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if (folder / MANIFEST).exists():
            return _as_it_is(settings, folder)
        state = _load_state(settings, folder)
        embedder = load_embedder(settings.embedder) if settings.kind.by_vectors else None
        if embedder is not None:
            dense_index.faiss()
        _read(state, folder, on_progress)
        if settings.kind.by_words and state.terms is None:
            state.terms, state.postings = merge_parts(folder, state.parts, lambda share: on_progress(MERGING, share))
            state.save(folder)
        if embedder is not None:
            _embed(state, folder, embedder, on_progress)
            _index_vectors(settings, folder, embedder.dimensions, on_progress)
        manifest = Manifest(
            settings=settings,
            passages=state.passages,
            terms=state.terms,
            postings=state.postings,
            dimensions=embedder.dimensions if embedder is not None else None,
            probe=probe(embedder) if embedder is not None else None,
            built=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            files=record_files(folder, _files(settings), lambda share: on_progress(HASHING, share)),
        )
        manifest.save(folder)
        (folder / STATE).unlink()
        shutil.rmtree(folder / PARTS, ignore_errors=True)
        return manifest


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises RetrievalError if another process builds in `folder`."""
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RetrievalError(f"another process builds the index {folder}; wait for its end") from None
        yield


def _as_it_is(settings: BuildSettings, folder: Path) -> Manifest:
    found = Manifest.load(folder)
    if found.settings != settings:
        raise RetrievalError(_other("is an index", found.settings, settings, folder))
    return found


def _load_state(settings: BuildSettings, folder: Path) -> BuildState:
    """How far the index is. Raises RetrievalError if what was begun is another one, or the folder is none of ours."""
    if (folder / STATE).exists():
        state = BuildState.model_validate_json((folder / STATE).read_bytes())
        if state.settings != settings:
            raise RetrievalError(_other("holds the beginning of an index", state.settings, settings, folder))
        return state
    others = sorted(path.name for path in folder.iterdir() if path.name != _LOCK)
    if others:
        raise RetrievalError(f"{folder} holds {others[0]!r} and no index; give an empty folder with --index")
    state = BuildState(settings=settings)
    state.save(folder)
    return state


def _other(what: str, found: BuildSettings, wanted: BuildSettings, folder: Path) -> str:
    names = [name for name in BuildSettings.model_fields if getattr(found, name) != getattr(wanted, name)]
    if "corpus_fingerprint" in names and "corpus" not in names:
        return f"{folder} {what} of {wanted.corpus} as it was before it changed; delete the folder or give another"
    words = ", ".join(f"{name}={_format(found, name)} and not {_format(wanted, name)}" for name in names)
    return f"{folder} {what} with {words}; delete the folder or give another"


def _format(settings: BuildSettings, name: str) -> str:
    value = getattr(settings, name)
    return str(getattr(value, "value", value))


def _read(state: BuildState, folder: Path, on_progress: OnProgress) -> None:
    """Copy the passages, and write the postings of each batch."""
    if state.read:
        return
    corpus = Corpus(Path(state.settings.corpus))
    stop_words = bm25.stop_words() if state.settings.kind.by_words else frozenset()
    with PassageWriter(folder, state.passage_bytes, state.passages) as writer:
        for passages, read in _batches(corpus, state.passages):
            if state.settings.kind.by_words:
                texts = [passage.contents for passage in passages]
                write_part(folder, state.parts, texts, state.passages, stop_words)
                state.parts += 1
            writer.add(passages)
            state.passages, state.passage_bytes = writer.count, writer.bytes
            state.save(folder)
            on_progress(READING, read / corpus.size)
    if not state.passages:
        raise RetrievalError(f"the corpus {state.settings.corpus!r} holds no passage")
    state.read = True
    state.save(folder)


def _batches(corpus: Corpus, skip: int) -> Iterator[tuple[list[Passage], int]]:
    """Passages, and the bytes of the corpus that are read by then."""
    batch: list[Passage] = []
    characters = read = 0
    for passage, read in corpus.passages(skip):
        batch.append(passage)
        characters += len(passage.contents)
        if len(batch) == PASSAGES_AT_A_TIME or characters > CHARACTERS_AT_A_TIME:
            yield batch, read
            batch, characters = [], 0
    if batch:
        yield batch, read


def _embed(state: BuildState, folder: Path, embedder: Embedder, on_progress: OnProgress) -> None:
    """Write the vector of each passage."""
    if (folder / dense_index.INDEX).exists():
        # They were there, and are in the index now.
        return
    store = PassageStore(folder)
    with (folder / dense_index.VECTORS).open("ab") as file:
        file.truncate(state.vectors * embedder.dimensions * np.dtype(np.float32).itemsize)
        while state.vectors < state.passages:
            end = min(state.vectors + EMBEDDED_AT_A_TIME, state.passages)
            texts = [store[number].contents for number in range(state.vectors, end)]
            file.write(embedder.passages(texts).tobytes())
            file.flush()
            state.vectors = end
            state.save(folder)
            on_progress(EMBEDDING, end / state.passages)


def _index_vectors(settings: BuildSettings, folder: Path, dimensions: int, on_progress: OnProgress) -> None:
    if not (folder / dense_index.INDEX).exists():
        dense_index.build_index(
            folder, settings.dense, dimensions, lambda share: on_progress(f"{settings.dense.value} index", share)
        )


def _files(settings: BuildSettings) -> list[str]:
    names = [passage_store.LINES, passage_store.ENDS]
    if settings.kind.by_words:
        names += bm25.FILES
    if settings.kind.by_vectors:
        names += dense_index.FILES[settings.dense]
    return names
