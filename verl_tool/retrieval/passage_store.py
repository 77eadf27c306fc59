"""The passages of an index: JSON lines, and where each begins, read without loading them."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import numpy as np
from typing_extensions import Self

from verl_tool.retrieval.passage import Passage
from verl_tool.util.json_text import encode_json

LINES, ENDS = "passages.jsonl", "passages.ends"
"""Names of the files: ``{"id", "contents"}`` a line, and behind which byte each line ends (64-bit numbers)."""
_END = np.dtype("<u8")


class PassageWriter:
    """Appends passages to the files in `folder`, behind the first `kept` bytes and passages that are there."""

    def __init__(self, folder: Path, stored_bytes: int = 0, kept: int = 0) -> None:
        self._lines = (folder / LINES).open("ab")
        self._ends = (folder / ENDS).open("ab")
        self._lines.truncate(stored_bytes)
        self._ends.truncate(kept * _END.itemsize)
        self.bytes = stored_bytes
        """Of the lines written by now."""
        self.count = kept
        """Passages written by now."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._ends.close()

    def add(self, passages: list[Passage]) -> None:
        """Append them, and hand them to the operating system."""
        lines = [encode_json({"id": passage.id, "contents": passage.contents}) + b"\n" for passage in passages]
        ends = self.bytes + np.cumsum([len(line) for line in lines], dtype=_END)
        self._lines.write(b"".join(lines))
        self._ends.write(ends.tobytes())
        self._lines.flush()
        self._ends.flush()
        self.bytes, self.count = int(ends[-1]), self.count + len(lines)


class PassageStore:
    def __init__(self, folder: Path) -> None:
        self._ends = np.memmap(folder / ENDS, dtype=_END, mode="r")
        with (folder / LINES).open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._ends)

    def line(self, number: int) -> bytes:
        """A passage as JSON: ``{"id": …, "contents": …}``. Raises IndexError."""
        if not 0 <= number < len(self._ends):
            raise IndexError(f"passage {number} of {len(self._ends)}")
        begin = int(self._ends[number - 1]) if number else 0
        return self._lines[begin : int(self._ends[number]) - 1]

    def __getitem__(self, number: int) -> Passage:
        return Passage(**json.loads(self.line(number)))
