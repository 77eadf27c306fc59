"""What the trainer knows of each token of a step's trajectories, in a file beside their records.

``step_3.tokens.npz``, of numpy's form, belongs to ``step_3.jsonl``. Per trajectory it has the line of its record and of
each token behind the prompt, the advantage, the trainer's log-probability before the update, and whether it is in the
loss.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from verl_tool.errors import ConfigError
from verl_tool.util.atomic_files import atomic_write
from verl_tool.util.confined_files import open_confined

COLUMNS: Mapping[str, str] = {"advantages": "f4", "log_probs": "f4", "mask": "u1"}
"""Types of the columns by their names. Each is one array of all tokens, trajectory behind trajectory."""
Tokens = Mapping[str, Sequence[np.ndarray | Sequence[float]]]
"""Some of `COLUMNS`, each with one array a trajectory. [response_length]"""


class TokenRecords:
    """Writes the files of a run."""

    def __init__(self, folder: Path | None, every: int) -> None:
        """`folder=None` writes none; nor does `every=0`. Raises ConfigError if `every` is below 0."""
        if every < 0:
            raise ConfigError(f"token_records_every is {every}; give the steps from one to the next, or 0")
        self._folder = folder
        self._every = every
        self._path: Path | None = None
        self._lines: list[int] = []
        self._columns: dict[str, list[np.ndarray]] = {}

    def is_due(self, step: int) -> bool:
        """Whether this step's tokens are kept."""
        return self._folder is not None and self._every > 0 and step % self._every == 0

    def add(self, step: int, lines: Sequence[int], tokens: Tokens) -> None:
        """Keep a batch. `lines` of its trajectories' records, counted from 0. A step may have more than one batch."""
        if self._folder is None:
            return
        path = tokens_path(self._folder / f"step_{step}.jsonl")
        if path != self._path:
            self._path, self._lines, self._columns = path, [], {name: [] for name in tokens}
        self._lines += lines
        for name, known in self._columns.items():
            known += [np.asarray(row, COLUMNS[name]) for row in tokens[name]]
        ends = np.cumsum([len(row) for row in next(iter(self._columns.values()))], dtype="i8")
        flat = {name: np.concatenate([np.zeros(0, COLUMNS[name]), *rows]) for name, rows in self._columns.items()}
        with atomic_write(path) as draft, draft.open("wb") as file:
            np.savez(file, lines=np.array(self._lines, "i8"), ends=ends, **flat)


def in_record_order(
    rows: Sequence[np.ndarray], places: Sequence[Sequence[tuple[int, int]]], counts: Sequence[int]
) -> list[np.ndarray]:
    """Join the rows of each rollout to one array, in the order of the record's response.

    rows: one array a row, rollout behind rollout. [response_length] places: of each row, start and length of its pieces
    in the record's response. counts: rows of each rollout.
    """
    joined, at = [], 0
    for count in counts:
        pieces = list(zip(rows[at : at + count], places[at : at + count], strict=True))
        whole = np.zeros(sum(len(row) for row, _ in pieces), "f4")
        for row, parts in pieces:
            begin = 0
            for start, length in parts:
                whole[start : start + length] = row[begin : begin + length]
                begin += length
        joined.append(whole)
        at += count
    return joined


def tokens_path(records: Path) -> Path:
    """The file beside a file of records."""
    return records.with_suffix(".tokens.npz")


def tokens_of(records: Path, line: int, folder: Path | None = None) -> dict[str, np.ndarray]:
    """The columns of the trajectory in this line of a file of records; empty if they were not stored.

    `folder`: what links may not lead out of; default: that of the records.
    """
    arrays = _arrays(records, folder)
    found = np.flatnonzero(arrays["lines"] == line) if arrays else np.zeros(0, "i8")
    if not len(found):
        return {}
    end = int(arrays["ends"][found[-1]])
    begin = int(arrays["ends"][found[-1] - 1]) if found[-1] else 0
    return {name: arrays[name][begin:end] for name in COLUMNS if name in arrays}


def mean_advantages(records: Path, rows: int, folder: Path | None = None) -> np.ndarray:
    """Mean advantage of the tokens in the loss, by line of a file of `rows` records; NaN where none is known. [rows]"""
    means = np.full(rows, np.nan, "f4")
    arrays = _arrays(records, folder)
    if not arrays or "advantages" not in arrays or not len(arrays["lines"]):
        return means
    mask = arrays.get("mask", np.ones(len(arrays["advantages"]), "u1")).astype("f8")
    bounds = np.append(0, arrays["ends"])
    sums, counts = (
        np.diff(np.append(0.0, np.cumsum(values)).take(bounds)) for values in (arrays["advantages"] * mask, mask)
    )
    inside = (arrays["lines"] < rows) & (counts > 0)
    means[arrays["lines"][inside]] = sums[inside] / counts[inside]
    return means


def _arrays(records: Path, folder: Path | None) -> dict[str, np.ndarray]:
    """All arrays of a file; none if it is not as `TokenRecords` writes it."""
    try:
        with (
            open_confined(tokens_path(records), folder or records.parent) as opened,
            zipfile.ZipFile(opened) as archive,
        ):
            # Compressed, a few kilobytes may hold gigabytes.
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                return {}
            max_bytes = os.fstat(opened.fileno()).st_size
            known = [name for name in (*COLUMNS, "lines", "ends") if f"{name}.npy" in archive.namelist()]
            if not all(_is_within(archive, f"{name}.npy", max_bytes) for name in known):
                return {}
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in known}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, NotImplementedError, MemoryError):
        return {}
    return arrays if _is_consistent(arrays) else {}


def _is_within(archive: zipfile.ZipFile, part: str, max_bytes: int) -> bool:
    """Whether an array has one side and is no larger than the file: memory is taken for what its header says.

    Raises ValueError.
    """
    with archive.open(part) as opened:
        version = np.lib.format.read_magic(opened)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(opened)
    return len(shape) == 1 and 0 <= shape[0] * dtype.itemsize <= max_bytes


def _is_consistent(arrays: Mapping[str, np.ndarray]) -> bool:
    columns = [arrays[name] for name in COLUMNS if name in arrays]
    places = [arrays[name] for name in ("lines", "ends") if name in arrays]
    if len(places) != 2 or any(a.ndim != 1 or a.dtype.kind not in "iuf" for a in (*columns, *places)):
        return False
    lines, ends = places
    lengths = np.diff(ends, prepend=0)
    last = ends[-1] if len(ends) else 0
    whole = lines.dtype.kind == ends.dtype.kind == "i"
    return bool(
        whole
        and len(lines) == len(ends)
        and np.all(lengths >= 0)
        and np.all(lines >= 0)
        and all(len(column) == last for column in columns)
    )
