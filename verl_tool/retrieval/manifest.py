"""What an index consists of, and how far one is that is being built."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from verl_tool.retrieval.dense_index import DenseKind
from verl_tool.retrieval.embedder import DEFAULT
from verl_tool.retrieval.passage import RetrievalError
from verl_tool.util.atomic_files import atomic_write

MANIFEST, STATE = "manifest.json", "build.json"
"""Names of the files: of an index that is complete, and of one that is not."""
FORMAT = 1
"""Of the files; another one cannot be read."""
_HASHED_AT_A_TIME = 4 << 20


class Kind(str, Enum):
    bm25 = "bm25"
    dense = "dense"
    hybrid = "hybrid"
    """Both, joined by reciprocal rank."""

    @property
    def by_words(self) -> bool:
        return self != Kind.dense

    @property
    def by_vectors(self) -> bool:
        return self != Kind.bm25


class BuildSettings(BaseModel):
    """What is to be built. An index goes on being built with the same settings only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: str
    corpus_fingerprint: str
    kind: Kind
    embedder: str = DEFAULT
    dense: DenseKind = DenseKind.flat


class BuildState(BaseModel):
    """How far an index is."""

    settings: BuildSettings
    passages: int = 0
    passage_bytes: int = 0
    parts: int = 0
    """Parts of the BM25 index that are written."""
    read: bool = False
    """The whole corpus is."""
    terms: int | None = None
    postings: int | None = None
    """Of the BM25 index, once it is merged."""
    vectors: int = 0

    def save(self, folder: Path) -> None:
        """Write it, so that a reader finds all of it or what was there before."""
        _write(folder / STATE, self.model_dump_json(indent=1))


class FileRecord(BaseModel):
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """An index that is complete."""

    format: int = FORMAT
    settings: BuildSettings
    passages: int
    terms: int | None = None
    postings: int | None = None
    dimensions: int | None = None
    """Numbers of a vector."""
    probe: list[float] | None = None
    """See `embedder.probe`."""
    built: str
    """When, in UTC."""
    files: dict[str, FileRecord]

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Raises RetrievalError if there is no complete index, or one of another format, or a file has another size."""
        try:
            found = cls.model_validate_json((folder / MANIFEST).read_bytes())
        except FileNotFoundError:
            raise RetrievalError(_no_index(folder)) from None
        except ValidationError as error:
            raise RetrievalError(f"{folder / MANIFEST} cannot be read: {error}") from error
        if found.format != FORMAT:
            raise RetrievalError(
                f"the index {folder} has format {found.format}; this version reads {FORMAT}: rebuild it"
            )
        for name, record in found.files.items():
            size = (folder / name).stat().st_size if (folder / name).exists() else None
            if size != record.bytes:
                what = "is missing" if size is None else f"has {size} bytes"
                raise RetrievalError(
                    f"{folder / name} {what}; its manifest says {record.bytes} bytes: rebuild the index"
                )
        return found

    def save(self, folder: Path) -> None:
        """Write it; from now on the index can be opened."""
        _write(folder / MANIFEST, self.model_dump_json(indent=1))

    def verify(self, folder: Path, on_progress: Callable[[float], None]) -> None:
        """Read every file. Raises RetrievalError naming those whose content is not what was written."""
        found = record_files(folder, list(self.files), on_progress)
        wrong = sorted(name for name in found if found[name] != self.files[name])
        if wrong:
            raise RetrievalError(f"{', '.join(wrong)} in {folder} is not what was built: rebuild the index")


def record_files(folder: Path, names: list[str], on_progress: Callable[[float], None]) -> dict[str, FileRecord]:
    total, read = sum((folder / name).stat().st_size for name in names), 0
    records = {}
    for name in names:
        digest = hashlib.sha256()
        with (folder / name).open("rb") as file:
            while block := file.read(_HASHED_AT_A_TIME):
                digest.update(block)
                read += len(block)
                on_progress(read / total)
        records[name] = FileRecord(bytes=(folder / name).stat().st_size, sha256=digest.hexdigest())
    return records


def _no_index(folder: Path) -> str:
    if (folder / STATE).exists():
        return f"the index {folder} is not complete; run its build again, which goes on where it ended"
    return f"there is no index in {folder}; build one with: python -m verl_tool.retrieval build --corpus … --index …"


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as draft:
        draft.write_text(text, encoding="utf-8")
