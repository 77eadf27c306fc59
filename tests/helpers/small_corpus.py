"""A corpus of an invented world for tests of index and search, and an index of it."""

from __future__ import annotations

import json
from pathlib import Path

from verl_tool.retrieval.corpus import Corpus
from verl_tool.retrieval.dense_index import DenseKind
from verl_tool.retrieval.index import Index
from verl_tool.retrieval.index_builder import OnProgress, build
from verl_tool.retrieval.manifest import BuildSettings, Kind

PAGES = {
    "Quellborn": "Quellborn is the capital of Arvandia. It lies on the river Lome and has 40,000 inhabitants.",
    "Arvandia": "Arvandia is a country of mountains and lakes. Its currency is the dorin.",
    "Mira Tolk": "Mira Tolk was a painter. She was born in Quellborn and painted the harbour of Sandmouth.",
    "Sandmouth": "Sandmouth is a port in the south. Ships carry wool, salt and amber from it.",
    "Lome": "The Lome is a river that rises in the Grey Hills and ends in the sea at Sandmouth.",
    "Grey Hills": "The Grey Hills are known for sheep, and for a castle that nobody has ever entered.",
}


def write_corpus(path: Path) -> Path:
    """Write JSON lines in the form of Search-R1, with the title in quotes."""
    rows = [{"id": str(i), "contents": f'"{title}"\n{text}'} for i, (title, text) in enumerate(PAGES.items())]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def settings_of(corpus: Path, kind: Kind, dense: DenseKind = DenseKind.flat) -> BuildSettings:
    """Return settings with the default embedder."""
    return BuildSettings(corpus=str(corpus), corpus_fingerprint=Corpus(corpus).fingerprint, kind=kind, dense=dense)


def unheard(stage: str, share: float) -> None:
    """Ignore progress."""


def build_index(corpus: Path, folder: Path, kind: Kind, on_progress: OnProgress = unheard) -> Index:
    """Build an index and open it."""
    build(settings_of(corpus, kind), folder, on_progress)
    return Index(folder)


def titles(index: Index, query: str, topk: int = 3) -> list[str]:
    """Return the titles of the results without quotes."""
    return [index.passage(hit.number).title.strip('"') for hit in index.search([query], topk)[0]]
