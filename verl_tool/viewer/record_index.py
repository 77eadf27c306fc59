"""An index beside the records of a run: a row of numbers a trajectory, so that a million of them open in a second.

``trajectories/.index/step_3.rows`` is that of ``trajectories/step_3.jsonl``: a line of JSON, and behind it the rows. It
is made when somebody looks, grows with its file, and is made anew if the file was replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from verl_tool.trainer.monitoring.token_records import mean_advantages, tokens_path
from verl_tool.util.confined_files import open_confined
from verl_tool.viewer.record_rows import MAX_WORDS, OTHER, ROW, WORDS, RowReader, ToolCallCounts
from verl_tool.viewer.run_files import RecordFile, Run

VERSION = 1
"""Of the files; others are made anew."""
FOLDER = ".index"
_PORTION = 32 << 20
"""Bytes of records that are read before what is known is shown."""
_LOOK_BACK = 4096
"""Bytes by which a file is known again."""
_MAX_HEAD = 64 << 20
"""Bytes of the first line of an index."""
MAX_LINE = 128 << 20
"""Bytes of one record. Of a longer line only its length is known."""


@dataclass
class FileIndex:
    read_bytes: int = 0
    """How much of the file: whole lines only."""
    head: int = 0
    tail: int = 0
    """Checksums of the first and last bytes read."""
    words: list[str] = field(default_factory=lambda: [""])
    tools: dict[str, ToolCallCounts] = field(default_factory=dict)
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, ROW))
    trained: int = 0
    """Time of the file of tokens, when its advantages were read."""
    seen: tuple[int, int, int] = (-1, -1, 0)
    """Size and time of the file when it was last looked at, and the time of the file of tokens beside it."""


@dataclass(frozen=True, eq=False)
class Records:
    """All rows of a run as they are at one time. `rows` is read only."""

    files: tuple[RecordFile, ...] = ()
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, ROW))
    words: tuple[str, ...] = ("",)
    tools: tuple[Mapping[str, ToolCallCounts], ...] = ()
    """Counts of calls, one entry a file."""
    version: int = 0
    missing_bytes: int = 0
    """Of records that are not read yet."""
    starts: tuple[int, ...] = ()
    """Where the rows of each file begin."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why a file is not read, by its name."""
    found: dict[Hashable, Any] = field(default_factory=dict)
    """What queries have found, for the next page."""

    def file_number(self, name: str) -> int | None:
        return next((number for number, file in enumerate(self.files) if file.name == name), None)

    def line(self, row: np.void) -> bytes:
        """A row's line of its file, `MAX_LINE` bytes of it at most. Raises OSError if the file is gone."""
        with self.files[row["file"]].open() as file:
            file.seek(int(row["offset"]))
            return file.read(min(int(row["length"]), MAX_LINE))


class _Head(msgspec.Struct):
    """The first line of an index."""

    version: int
    read_bytes: int
    head: int
    tail: int
    words: list[str]
    tools: dict[str, ToolCallCounts]
    trained: int
    seen: tuple[int, int, int]


class RecordIndex:
    """The rows of one run, brought up to date by `refresh`, which only one thread calls at a time."""

    def __init__(self, run: Run, elsewhere: Path | None = None) -> None:
        """`elsewhere`: a folder for the index; default: beside the records, or in the cache where that is forbidden."""
        self._run = run
        self._folder = _index_folder(run.records_folder, elsewhere)
        self._known: dict[Path, FileIndex] = {}
        self._problems: dict[str, str] = {}
        self._refreshing = threading.Lock()
        self.records = Records()

    def refresh(self) -> bool:
        """Read what is new, publishing `records` after each portion; whether there was anything new."""
        with self._refreshing:
            files = self._run.record_files()
            self._problems = {}
            changed = [file for file in files if self._isolate(file, self._look)]
            others = tuple(files) != self.records.files or self._problems != self.records.problems
            for file in changed:
                self._isolate(file, lambda file: self._read(file, files))
            if changed or others:
                self._publish(files)
            return bool(changed or others)

    def _isolate(self, file: RecordFile, act: Callable[[RecordFile], Any]) -> Any:
        """Run `act`; an error that a file causes is noted as its problem, and others are read on."""
        try:
            return act(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, MemoryError) as error:
            self._problems[file.name] = str(error) or type(error).__name__
            return None

    def _read(self, file: RecordFile, files: Sequence[RecordFile]) -> None:
        known = self._known[file.path]
        before = known.read_bytes
        for _ in _read_on(file, known):
            if _missing(file, known) > _PORTION // 2:
                self._publish(files)
        trained = known.seen[2]
        if known.read_bytes != before or known.trained != trained:
            known.rows["advantage"] = mean_advantages(file.path, len(known.rows), file.folder)
            known.trained = trained
            self._save(file, known)

    def _look(self, file: RecordFile) -> bool:
        """Whether there is something to read in a file; one that was replaced is forgotten.

        Of one that is as its index tells, not a byte is read. Raises OSError if it cannot be read.
        """
        with file.open() as opened:
            stat = os.fstat(opened.fileno())
        known = self._known.get(file.path)
        if known is None:
            known = self._known[file.path] = self._load(file)
        seen = (stat.st_size, stat.st_mtime_ns, _time_of(tokens_path(file.path)))
        if known.seen == seen:
            return False
        known.seen = seen
        if not _same_file(file, known):
            self._known[file.path] = FileIndex(seen=seen)
        return True

    def _publish(self, files: Sequence[RecordFile]) -> None:
        words: dict[str, int] = {"": 0}
        parts, starts, start = [], [], 0
        for number, file in enumerate(files):
            known = self._known.setdefault(file.path, FileIndex())
            rows = known.rows.copy()
            rows["file"] = number
            places = np.array([_place(words, word) for word in known.words], dtype="u2")
            for name in WORDS:
                rows[name] = places[rows[name]]
            parts.append(rows)
            starts.append(start)
            start += len(rows)
        rows = np.concatenate(parts) if parts else np.zeros(0, ROW)
        rows.flags.writeable = False
        self.records = Records(
            tuple(files),
            rows,
            tuple(words),
            tuple(self._known[file.path].tools for file in files),
            self.records.version + 1,
            sum(_missing(file, self._known[file.path]) for file in files),
            tuple(starts),
            dict(self._problems),
        )

    def _path(self, file: RecordFile) -> Path:
        return self._folder / f"{file.name}.rows"

    def _load(self, file: RecordFile) -> FileIndex:
        try:
            with open_confined(self._path(file), self._folder) as opened:
                if os.fstat(opened.fileno()).st_size > _MAX_HEAD + ROW.itemsize * (_size_of(file) // 2 + 1):
                    return FileIndex()
                head, _, content = opened.read().partition(b"\n")
            known = msgspec.json.decode(head, type=_Head)
            rows = np.frombuffer(content, ROW).copy()
        except (OSError, ValueError, msgspec.DecodeError, RecursionError):
            return FileIndex()
        if known.version != VERSION or not _is_consistent(known, rows):
            return FileIndex()
        fields = {name: getattr(known, name) for name in _Head.__struct_fields__ if name != "version"}
        return FileIndex(**fields, rows=rows)

    def _save(self, file: RecordFile, known: FileIndex) -> None:
        fields = {name: getattr(known, name) for name in _Head.__struct_fields__ if name != "version"}
        path = self._path(file)
        # Of a name that nobody can have put a link at.
        part = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        # Without an index all is read again the next time.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent.is_symlink():
                return
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(part, flags, 0o644), "wb") as out:
                out.write(msgspec.json.encode(_Head(VERSION, **fields)) + b"\n")
                out.write(known.rows.tobytes())
            part.replace(path)


def _read_on(file: RecordFile, known: FileIndex) -> Iterator[None]:
    """Read whole lines behind what is known, a portion at a time."""
    reader = RowReader(known.words, known.tools)
    with file.open() as source:
        while True:
            lines = list(_whole_lines(source, known.read_bytes))
            if not lines:
                break
            rows = np.zeros(len(lines), ROW)
            first, offset = len(known.rows), known.read_bytes
            for number, (line, length) in enumerate(lines):
                rows[number]["line"] = first + number
                rows[number]["offset"], rows[number]["length"] = offset, length
                rows[number]["step"] = -1 if file.step is None else file.step
                offset += length
                reader.read(line, rows[number], file.kind)
            known.rows = np.concatenate([known.rows, rows])
            known.words, known.tools, known.read_bytes = reader.words, dict(reader.tools), offset
            yield
        known.head, known.tail = _checksums(source, known.read_bytes)


def _place(words: dict[str, int], word: str) -> int:
    """The number of a word in a run's list, which numbers of two bytes count."""
    if word not in words and len(words) >= MAX_WORDS:
        word = OTHER
    return words.setdefault(word, len(words))


def _whole_lines(source: BinaryIO, offset: int) -> Iterator[tuple[bytes, int]]:
    """Lines from `offset` on with their lengths, about `_PORTION` of bytes; one that is not ended is being written.

    A line of more than `MAX_LINE` bytes is empty.
    """
    source.seek(offset)
    read = 0
    while read < _PORTION:
        line = part = source.readline(MAX_LINE)
        length = len(part)
        while len(part) == MAX_LINE and not part.endswith(b"\n"):
            line, part = b"", source.readline(MAX_LINE)
            length += len(part)
        if not part.endswith(b"\n"):
            return
        read += length
        yield line, length


def _is_consistent(head: _Head, rows: np.ndarray) -> bool:
    """Whether rows lie one behind the other in their file, and name words that there are: an index may be forged."""
    ends = np.cumsum(rows["length"])
    return bool(
        head.words[:1] == [""]
        and np.all(rows["length"] > 0)
        and np.array_equal(rows["offset"], ends - rows["length"])
        and (ends[-1] if len(ends) else 0) == head.read_bytes
        and np.array_equal(rows["line"], np.arange(len(rows)))
        and all(np.all(rows[name] < len(head.words)) for name in WORDS)
    )


def _same_file(file: RecordFile, known: FileIndex) -> bool:
    """Whether a file still begins with what was read of it."""
    with file.open() as source:
        return known.seen[0] >= known.read_bytes and (known.head, known.tail) == _checksums(source, known.read_bytes)


def _checksums(source: BinaryIO, read_bytes: int) -> tuple[int, int]:
    source.seek(0)
    head = zlib.crc32(source.read(min(_LOOK_BACK, read_bytes)))
    source.seek(max(0, read_bytes - _LOOK_BACK))
    return head, zlib.crc32(source.read(min(_LOOK_BACK, read_bytes)))


def _missing(file: RecordFile, known: FileIndex) -> int:
    return max(0, known.seen[0] - known.read_bytes)


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _size_of(file: RecordFile) -> int:
    try:
        return file.path.stat().st_size
    except OSError:
        return 0


def _index_folder(records: Path, elsewhere: Path | None) -> Path:
    neighbours = records / FOLDER
    if elsewhere is None and os.access(records, os.W_OK) and not neighbours.is_symlink():
        return neighbours
    root = elsewhere or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl_tool" / "viewer"
    return root / hashlib.sha256(str(records).encode()).hexdigest()[:16]
