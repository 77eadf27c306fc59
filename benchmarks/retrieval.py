"""The retrieval server against the bare library in batches, in one run: `python benchmarks/retrieval.py`.

Over a made corpus of `--passages` passages, which is built once and kept in `--folder`. Systems: `library` (one process
that calls embedder and faiss, which multiplies matrices as for the server, or bm25s, with batches of as many queries as
there are clients, and fetches no passage),
`server` (`python -m verl_tool.retrieval serve`, as many clients with a connection and a query at a time each), and with
`--search-r1 CHECKOUT` Search-R1's own server on the same vectors, or with `--search-r1-url` one that runs elsewhere.

Search-R1's encoder runs on CUDA only; it gets the embedder of the index in its place, so that what is compared is how
requests are served and vectors searched.

Ratios are what to read. The systems take turns, `--rounds` times each, back and forth.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import typer
from load import Cell, in_turn, markdown, measure, print_cells, write_json
from numpy.typing import NDArray
from rich.console import Console
from served_tools import Connections, running

from verl_tool.retrieval import dense_index
from verl_tool.retrieval.bm25 import Bm25Index, stop_words, words_of
from verl_tool.retrieval.corpus import Corpus
from verl_tool.retrieval.dense_index import open_vectors
from verl_tool.retrieval.embedder import DEFAULT, load_embedder
from verl_tool.retrieval.index_builder import build
from verl_tool.retrieval.manifest import BuildSettings, Kind, Manifest
from verl_tool.servers.serve.ports import free_ports

console = Console(stderr=True)

TOPK = 3
LIBRARY, SERVER, SEARCH_R1 = "library", "server", "Search-R1's server"
WORDS_OF_PASSAGE = (30, 110)
"""The least and the most."""
VOCABULARY = 50_000
QUERIES = 5000
_SYLLABLES = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
_AT_A_TIME = 10_000
SEARCH_R1_SERVER = '''
import importlib.util
import os
import sys
from pathlib import Path

import uvicorn

from verl_tool.retrieval.embedder import load_embedder

checkout, index, corpus, port = sys.argv[1:]
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(Path(index).parent / "search_r1_cache")}
spec = importlib.util.spec_from_file_location("server", Path(checkout) / "search_r1/search/retrieval_server.py")
server = importlib.util.module_from_spec(spec)
sys.modules["server"] = server
spec.loader.exec_module(server)


class Encoder:
    """The embedder of the index, in place of a model on CUDA."""

    def __init__(self, **options):
        self._embedder = load_embedder("wordllama")

    def encode(self, query_list, is_query=True):
        return self._embedder.queries([query_list] if isinstance(query_list, str) else query_list)


server.Encoder = Encoder
server.config = server.Config(
    retrieval_method="e5", index_path=index, corpus_path=corpus, retrieval_topk=3, faiss_gpu=False,
    retrieval_batch_size=512,
)
server.retriever = server.get_retriever(server.config)
server.app.add_api_route("/openapi_is_up", lambda: "yes")
uvicorn.run(server.app, host="127.0.0.1", port=int(port), log_level="warning")
'''

Search = Callable[[Sequence[str]], Any]
"""A batch of queries, by the library alone."""


@functools.cache
def vocabulary() -> NDArray[np.object_]:
    """Invented words, all different."""
    random = np.random.default_rng(0)
    words: dict[str, None] = {}
    while len(words) < VOCABULARY:
        syllables = random.integers(len(_SYLLABLES), size=random.integers(2, 5))
        words["".join(_SYLLABLES[syllable] for syllable in syllables)] = None
    return np.array(list(words), dtype=object)


def sentences(count: int, least: int, most: int, seed: int) -> list[list[str]]:
    """Texts of invented words, of which few are frequent and most are rare (Zipf's law)."""
    random = np.random.default_rng(seed)
    cumulated = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    lengths = random.integers(least, most, size=count)
    places = np.searchsorted(cumulated, cumulated[-1] * random.random(lengths.sum()))
    return [part.tolist() for part in np.split(vocabulary()[places], np.cumsum(lengths)[:-1])]


def make_corpus(path: Path, passages: int) -> Path:
    """Write the corpus unless it is there."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    with draft.open("w") as file:
        for first in range(0, passages, _AT_A_TIME):
            count = min(_AT_A_TIME, passages - first)
            for number, words in enumerate(sentences(count, *WORDS_OF_PASSAGE, seed=first + 1), first):
                contents = f'"{" ".join(words[:2])} {number}"\n{" ".join(words)}.'
                file.write(f"{json.dumps({'id': str(number), 'contents': contents})}\n")
    os.replace(draft, path)
    return path


def make_index(corpus: Path, folder: Path, kind: Kind) -> Manifest:
    """Build the index unless it is there."""
    path = corpus.resolve()
    settings = BuildSettings(corpus=str(path), corpus_fingerprint=Corpus(path).fingerprint, kind=kind)
    return build(settings, folder, lambda stage, share: console.print(f"{kind.value}: {stage} {share:.0%}", end="\r"))


def bare_library(folder: Path, manifest: Manifest) -> Search:
    """What a batch costs with the libraries alone, on the same files."""
    if manifest.settings.kind == Kind.bm25:
        return _bare_bm25s(folder, manifest.passages)
    assert manifest.dimensions is not None
    faiss, embedder = dense_index.faiss(), load_embedder(DEFAULT)
    vectors = open_vectors(folder, manifest.dimensions)

    def search(queries: Sequence[str]) -> Any:
        return faiss.knn(embedder.queries(queries), vectors, TOPK, metric=faiss.METRIC_INNER_PRODUCT)

    return search


def _bare_bm25s(folder: Path, passages: int) -> Search:
    """Words, scores and the best by bm25s' own functions, as its `retrieve` calls them."""
    from bm25s.selection import topk

    index, stops = Bm25Index(folder, passages), stop_words()

    def search(queries: Sequence[str]) -> Any:
        ids = [index._ids(words_of(query, stops)) for query in queries]
        return [topk(index._bm25.get_scores_from_ids(each), k=TOPK, backend="numpy", sorted=True) for each in ids]

    return search


async def measure_library(search: Search, queries: Sequence[str], clients: int, seconds: float, kind: str) -> Cell:
    """One batch after the other, of as many queries as there are clients."""

    async def call(number: int) -> int:
        first = number * clients % (len(queries) - clients)
        await asyncio.to_thread(search, queries[first : first + clients])
        return clients

    cell = await measure(
        call, system=LIBRARY, snippet=kind, concurrency=1, seconds=seconds, executions_per_call=clients,
        pids=[os.getpid()],
    )  # fmt: skip
    return replace(cell, concurrency=clients)


async def measure_server(
    url: str, system: str, queries: Sequence[str], clients: int, seconds: float, kind: str, pids: Sequence[int]
) -> Cell:
    """Each client asks one query at a time, over a connection of its own."""
    async with Connections(url, "/retrieve") as connections:

        async def call(number: int) -> int:
            query = queries[number % len(queries)]
            found = (await connections.post({"queries": [query], "topk": TOPK, "return_scores": True}))["result"][0]
            return int(0 < len(found) <= TOPK)

        return await measure(call, system=system, snippet=kind, concurrency=clients, seconds=seconds, pids=pids)


@asynccontextmanager
async def search_r1(checkout: Path, folder: Path, corpus: Path, dimensions: int) -> AsyncIterator[tuple[str, int]]:
    """Search-R1's own server on the vectors of the index: URL and process id."""
    faiss = dense_index.faiss()
    index = faiss.IndexFlatIP(dimensions)
    index.add(np.asarray(open_vectors(folder, dimensions)))
    path = folder.parent / "search_r1.index"
    faiss.write_index(index, str(path))
    del index
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as temporary:
        script = Path(temporary) / "server.py"
        script.write_text(SEARCH_R1_SERVER)
        command = [sys.executable, str(script), str(checkout), str(path), str(corpus), str(port)]
        url = f"http://127.0.0.1:{port}"
        async with running(command, f"{url}/openapi_is_up") as process:
            yield url, process.pid


async def compare(
    kind: Kind,
    corpus: Path,
    folder: Path,
    clients: Sequence[int],
    seconds: float,
    rounds: int,
    checkout: Path | None,
    other_url: str | None,
) -> list[Cell]:
    """All systems over an index of one kind."""
    manifest = make_index(corpus, folder, kind)
    queries = [" ".join(words) for words in sentences(QUERIES, 4, 10, seed=0)]
    library = bare_library(folder, manifest)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "verl_tool.retrieval", "serve", "--index", str(folder), "--port", str(port)]
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(running(command, f"{url}/health"))
        servers = [(url, SERVER, [process.pid])]
        if checkout is not None and kind == Kind.dense and manifest.dimensions is not None:
            theirs, pid = await stack.enter_async_context(search_r1(checkout, folder, corpus, manifest.dimensions))
            servers.append((theirs, SEARCH_R1, [pid]))
        elif other_url is not None and kind == Kind.dense:
            servers.append((other_url.removesuffix("/retrieve").rstrip("/"), SEARCH_R1, []))
        cells = []
        for count in clients:
            turns = [partial(measure_library, library, queries, count, seconds, kind.value)]
            turns += [
                partial(measure_server, where, system, queries, count, seconds, kind.value, pids)
                for where, system, pids in servers
            ]
            cells += await in_turn(turns, rounds, LIBRARY)
    return cells


def verdicts(cells: Sequence[Cell]) -> list[str]:
    """What the figures say, in words."""
    lines = []
    for cell in cells:
        if cell.system != SERVER or cell.ratio is None:
            continue
        words = f"{cell.ratio:.0%} of the library in batches, p99 {cell.p99_ms / cell.p50_ms:.1f} x p50"
        theirs = next(
            (c for c in cells if (c.snippet, c.concurrency, c.system) == (cell.snippet, cell.concurrency, SEARCH_R1)),
            None,
        )
        if theirs is not None and theirs.ratio:
            words += f", {cell.ratio / theirs.ratio:.1f} x Search-R1's server"
        lines.append(f"{cell.snippet}, {cell.concurrency} clients: {words}")
    return lines


def main(
    passages: int = typer.Option(1_000_000, min=100, help="Of the made corpus."),
    kinds: str = typer.Option("bm25,dense", help="Kinds of index, separated by commas: bm25, dense."),
    clients: str = typer.Option("1,8,64", help="How many ask at once, separated by commas."),
    seconds: float = typer.Option(15.0, min=0.5, help="Of each measurement."),
    rounds: int = typer.Option(3, min=1),
    folder: Path = typer.Option(
        Path("outputs/benchmarks/retrieval"), help="Corpus and indexes, kept for the next run."
    ),
    search_r1: Path | None = typer.Option(None, help="Checkout of Search-R1, whose server runs beside on the vectors."),
    search_r1_url: str | None = typer.Option(None, help="Or a server of its kind that runs, on the same index."),
    out: Path = typer.Option(Path("outputs/benchmarks/retrieval.json")),
) -> None:
    """Measure, print a table, write JSON."""
    chosen = [Kind(name.strip()) for name in kinds.split(",")]
    if Kind.hybrid in chosen:
        raise typer.BadParameter("hybrid is both libraries; measure bm25 and dense", param_hint="--kinds")
    corpus = make_corpus(folder / f"{passages}.jsonl", passages)
    counts = [int(count) for count in clients.split(",")]
    cells: list[Cell] = []
    for kind in chosen:
        index = folder / f"{passages}.{kind.value}"
        cells += asyncio.run(compare(kind, corpus, index, counts, seconds, rounds, search_r1, search_r1_url))
    print_cells(cells, f"{passages} passages, topk {TOPK}")
    print(markdown(cells))
    for line in verdicts(cells):
        console.print(line, highlight=False)
    write_json(out, cells, passages=passages, topk=TOPK, verdicts=verdicts(cells))


if __name__ == "__main__":
    typer.run(main)
