"""Store the trainer's values for each token of a step's trajectories in a file next to their records.

``step_3.tokens.npz``, in numpy's format, belongs to ``step_3.jsonl``. For each trajectory it has the line of its record
and, for each response token, the advantage, the trainer's log-probability before the update, and the loss mask.
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
"""Types of the columns by name. Each column is one array with the tokens of all trajectories one after the other."""
Tokens = Mapping[str, Sequence[np.ndarray | Sequence[float]]]
"""Some of `COLUMNS`, each with one array per trajectory. [response_length]"""


class TokenRecords:
    """Writes the token records of a run."""

    def __init__(self, folder: Path | None, every: int) -> None:
        """Write every `every` steps. `folder=None` or `every=0` disables it. Raises ConfigError if `every` is below
        0."""
        if every < 0:
            raise ConfigError(f"token_records_every is {every}; give the steps from one to the next, or 0")
        self._folder = folder
        self._every = every
        self._path: Path | None = None
        self._lines: list[int] = []
        self._columns: dict[str, list[np.ndarray]] = {}

    def is_due(self, step: int) -> bool:
        """Return whether to write this step's tokens."""
        return self._folder is not None and self._every > 0 and step % self._every == 0

    def add(self, step: int, lines: Sequence[int], tokens: Tokens) -> None:
        """Write a batch. `lines` are those of its trajectories' records, from 0. A step may have several batches."""
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

    `rows` has one array per row, ordered by rollout. [response_length] `places` has the start and length of each row's
    pieces in the record's response, and `counts` the number of rows per rollout.
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
    """Return the path of the token records for a file of records."""
    return records.with_suffix(".tokens.npz")


def tokens_of(records: Path, line: int, folder: Path | None = None) -> dict[str, np.ndarray]:
    """Read the columns of the trajectory in one line of a file of records. Returns nothing if they were not stored.

    Links must not lead out of `folder`, by default the folder of the records.
    """
    arrays = _arrays(records, folder)
    found = np.flatnonzero(arrays["lines"] == line) if arrays else np.zeros(0, "i8")
    if not len(found):
        return {}
    end = int(arrays["ends"][found[-1]])
    begin = int(arrays["ends"][found[-1] - 1]) if found[-1] else 0
    return {name: arrays[name][begin:end] for name in COLUMNS if name in arrays}


def mean_advantages(records: Path, rows: int, folder: Path | None = None) -> np.ndarray:
    """Return the mean advantage of the tokens in the loss for each of `rows` records; NaN if it is unknown. [rows]"""
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
    """Read all arrays of a file. Returns nothing if `TokenRecords` cannot have written it."""
    try:
        with (
            open_confined(tokens_path(records), folder or records.parent) as opened,
            zipfile.ZipFile(opened) as archive,
        ):
            # A few compressed kilobytes could expand to gigabytes.
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
    """Return whether an array is one-dimensional and not larger than the file. numpy allocates what the header says.

    Raises ValueError if the header cannot be read.
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
