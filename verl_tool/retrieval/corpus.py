"""Reading a corpus, passage by passage: JSON lines, parquet, or a folder of them or of plain texts.

A row is ``{"id": …, "contents": "title\\ntext"}``, as in Search-R1's corpora, or has ``title`` and ``text`` in place of
``contents``. A row without an id (``id``, ``_id`` or ``docid``) gets its number in the corpus.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from verl_tool.retrieval.passage import Passage, RetrievalError
from verl_tool.util.json_text import BadJsonError, decode_json, excerpt

ID_FIELDS = ("id", "_id", "docid")
COLUMNS = (*ID_FIELDS, "contents", "title", "text")
"""The fields that are read; a row may have others."""
JSON_SUFFIXES = (".jsonl", ".jsonl.gz")
TEXT_SUFFIXES = (".txt", ".md", ".rst")
PASSAGE_WORDS = 100
"""Words of a passage of a plain text, as in the corpora of Wikipedia that the field uses."""
_WORD = re.compile(r"\s*\S+\s*")
_PARQUET_ROWS = 1024
"""Rows of a parquet file that are read at a time."""


class CorpusRows(Protocol):
    """One file of a corpus."""

    def __call__(self, path: Path, skip: int) -> Iterator[tuple[str, Mapping[str, Any], int]]:
        """Its rows behind the first `skip`: where each stands, in words, the row, and the bytes of the file that are
        read by then."""


class Corpus:
    """The passages of a file or of a folder's files in the order of their names.

    Raises RetrievalError if there is nothing that can be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _files_of(path)
        self._rows, self._count = _reader_of(path, self._files)
        self.size = sum(file.stat().st_size for file in self._files)
        """Bytes of all files, the unit of progress."""

    @property
    def fingerprint(self) -> str:
        """Changes if a file is added, taken away, or written anew. From names, sizes and times of change."""
        digest = hashlib.sha256()
        for file in self._files:
            found = file.stat()
            digest.update(f"{file.relative_to(self.path.parent)}\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def passages(self, skip: int = 0) -> Iterator[tuple[Passage, int]]:
        """The passages behind the first `skip`, and how many bytes of the corpus are read by then. Raises
        RetrievalError that names file and place of a row which is no passage."""
        number, before = 0, 0
        for file in self._files:
            rows = self._count(file) if skip > number else 0
            left_out = min(rows, skip - number) if rows else 0
            number += left_out
            if not rows or left_out < rows:
                for where, row, read in self._rows(file, left_out):
                    yield _passage(row, number, where), before + read
                    number += 1
            before += file.stat().st_size


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise RetrievalError(f"the corpus {str(path)!r} is no file and no folder")
    found = (file for file in path.rglob("*") if file.is_file())
    files = sorted(file for file in found if not any(p.startswith(".") for p in file.relative_to(path).parts))
    if not files:
        raise RetrievalError(f"the corpus {str(path)!r} is an empty folder")
    return files


def _reader_of(path: Path, files: list[Path]) -> tuple[CorpusRows, Callable[[Path], int]]:
    """How to read and how to count the rows of a file of this corpus."""
    readers: dict[tuple[str, ...], tuple[CorpusRows, Callable[[Path], int]]] = {
        JSON_SUFFIXES: (_json_rows, _count_json_rows),
        (".parquet",): (_parquet_rows, _count_parquet_rows),
        TEXT_SUFFIXES: (_text_rows, _count_text_rows),
    }
    for suffixes, reader in readers.items():
        if files[0].name.endswith(suffixes):
            other = next((file for file in files if not file.name.endswith(suffixes)), None)
            if other is not None:
                words = f"it begins with {files[0].name!r} and holds {other.name!r}"
                raise RetrievalError(f"the corpus {str(path)!r} mixes kinds of files: {words}; use one kind")
            return reader
    known = ", ".join((*JSON_SUFFIXES, ".parquet", *TEXT_SUFFIXES))
    raise RetrievalError(f"{files[0].name!r} in the corpus {str(path)!r} is of no known kind; known: {known}")


def _lines(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Number from 1, content, and the bytes of the file read by then, of each line that is not blank."""
    with path.open("rb", buffering=1 << 20) as file:
        try:
            for number, line in enumerate(gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file, 1):
                if not line.isspace():
                    yield number, line, file.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise RetrievalError(f"{path} is a broken gzip file: {error}") from error


def _json_rows(path: Path, skip: int) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    for number, line, read in _lines(path):
        if skip:
            skip -= 1
            continue
        where = f"{path}, line {number}"
        try:
            row = decode_json(line)
        except BadJsonError as error:
            raise RetrievalError(f"{where}: {error}") from None
        if not isinstance(row, dict):
            raise RetrievalError(f"{where}: {excerpt(row)} is no object; write one with 'contents', or 'text'")
        yield where, row, read


def _count_json_rows(path: Path) -> int:
    return sum(1 for _ in _lines(path))


def _parquet_file(path: Path) -> Any:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise RetrievalError(f"reading {path} needs pyarrow, which is not installed: pip install pyarrow") from error
    try:
        return ParquetFile(path)
    except ArrowInvalid as error:
        raise RetrievalError(f"{path} is no parquet file: {error}") from error


def _parquet_rows(path: Path, skip: int) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    file, size = _parquet_file(path), path.stat().st_size
    groups: list[int] = []
    first, total = 0, file.metadata.num_rows
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if groups or first + rows > skip:
            groups.append(group)
        else:
            first += rows
    columns = [name for name in COLUMNS if name in file.schema_arrow.names]
    for batch in file.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=columns):
        for row in batch.to_pylist():
            if first >= skip:
                yield f"{path}, row {first}", row, size * (first + 1) // total
            first += 1


def _count_parquet_rows(path: Path) -> int:
    count: int = _parquet_file(path).metadata.num_rows
    return count


def _text_rows(path: Path, skip: int) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """Passages of `PASSAGE_WORDS` words; the title is the file's name. Line ends stay as they are."""
    read = 0
    for number, (text, size) in enumerate(_text_passages(path)):
        read += size
        if number >= skip:
            yield f"{path}, passage {number}", {"title": path.stem, "text": text}, read


def _text_passages(path: Path) -> Iterator[tuple[str, int]]:
    """Texts, and the bytes that each takes in the file. Lines longer than a passage are divided."""
    parts: list[str] = []
    words = size = 0
    with path.open(encoding="utf-8", errors="strict", newline="") as file:
        try:
            for line in file:
                size += len(line.encode())
                for piece in _divided(line, PASSAGE_WORDS):
                    count = len(piece.split())
                    if words and words + count > PASSAGE_WORDS:
                        yield "".join(parts).strip(), size
                        parts, words, size = [], 0, 0
                    parts.append(piece)
                    words += count
        except UnicodeDecodeError as error:
            raise RetrievalError(f"{path} is not UTF-8 ({error.reason}); convert it") from None
    if words:
        yield "".join(parts).strip(), size


def _divided(line: str, most: int) -> list[str]:
    """The line in pieces of at most so many words, white space included."""
    words = _WORD.findall(line)
    return ["".join(words[i : i + most]) for i in range(0, len(words), most)]


def _count_text_rows(path: Path) -> int:
    return sum(1 for _ in _text_passages(path))


def _passage(row: Mapping[str, Any], number: int, where: str) -> Passage:
    found = next((row[name] for name in ID_FIELDS if row.get(name) is not None), number)
    contents = row.get("contents")
    if contents is None and isinstance(row.get("text"), str):
        title = row.get("title")
        if not (title is None or isinstance(title, str)):
            raise RetrievalError(f"{where}: 'title' is {excerpt(title)}; it must be a text")
        contents = f"{' '.join((title or '').split())}\n{row['text']}"
    if not isinstance(contents, str):
        fields = ", ".join(sorted(map(str, row))[:10]) or "none"
        raise RetrievalError(f"{where}: no text 'contents', nor 'text' with or without 'title'; fields: {fields}")
    return Passage(str(found), contents)
