"""The run's stdout and stderr: files of the pool, with a journal of the order in which they were written."""

from __future__ import annotations

import io
import os
import sys

from . import wire


class Journal:
    """Where the run notes each change from one stream to the other (see `wire.JOURNAL_BYTES`)."""

    def __init__(self, words: memoryview) -> None:
        """`words`: the journal as unsigned 64-bit words, shared with the pool."""
        self._words = words
        self.current = 1

    def switch(self, fd: int) -> None:
        """Note how far the stream now left has got. When the journal is full, order is kept no more."""
        left = self.current
        flush(left)  # a line that was begun there came before this write
        self.current = fd
        count = self._words[wire.COUNT]
        if count < wire.SWITCHES:
            try:
                position = os.fstat(left).st_size
            except OSError:  # the user's code closed it
                return
            self._words[wire.FIRST_SWITCH + count] = position << 1 | (left - 1)
            self._words[wire.COUNT] = count + 1

    def drop(self, fd: int, size: int) -> None:
        """Note that `size` bytes were written to `fd` beyond the limit."""
        self._words[wire.DROPPED_OUT + fd - 1] += size


class OutputFile(io.FileIO):
    """File descriptor 1 or 2: keeps what fits the limit and counts the rest, so that printing never fails."""

    journal: Journal | None = None
    room = 0

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self._fd = fd

    def write(self, data, /):
        """As `io.RawIOBase.write`; reports all of `data` as written."""
        journal = self.journal
        if journal is None:
            return super().write(data)
        if journal.current != self._fd:
            journal.switch(self._fd)
        size = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        if size <= self.room:
            written = super().write(data)
            self.room -= written
            return written
        taken = super().write(memoryview(data).cast("B")[: self.room]) if self.room else 0
        self.room -= taken
        if self.room == 0:
            journal.drop(self._fd, size - taken)
            return size
        return taken


_NAMES = {1: "stdout", 2: "stderr"}
_opened: dict[int, io.TextIOWrapper] = {}
"""The streams of `open_output` by file descriptor."""
_files: dict[int, OutputFile] = {}
"""What is below them, also when the user's code has taken them apart."""


def flush(fd: int) -> None:
    """Write out what the stream on file descriptor 1 or 2 holds."""
    try:
        _opened[fd].flush()
    except (OSError, ValueError):  # the user's code closed it
        return


def open_output(fd: int) -> io.TextIOWrapper:
    """A text stream on `fd` that passes on each line as it ends: what was printed before a kill is not lost."""
    _files[fd] = OutputFile(fd)
    buffer = io.BufferedWriter(_files[fd])
    stream = io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    stream.mode = "w"  # type: ignore[misc]
    _opened[fd] = stream
    return stream


def open_outputs() -> None:
    """Put them in the place of Python's own."""
    for fd, name in _NAMES.items():
        stream = open_output(fd)
        for attribute in (name, f"__{name}__"):
            setattr(sys, attribute, stream)


def reopen() -> None:
    """Open what the user's code has closed or taken apart: our own streams, and what stands in the place of one."""
    for fd, name in _NAMES.items():
        if _is_closed(_opened[fd]):
            setattr(sys, f"__{name}__", open_output(fd))
        if _is_closed(getattr(sys, name, None)):
            setattr(sys, name, _opened[fd])


def _is_closed(stream: object) -> bool:
    try:
        return stream is None or getattr(stream, "closed", False) is True
    except Exception:  # noqa: BLE001  (a detached one raises ValueError, the user's own anything)
        return True


def attach(journal: Journal | None, limit: int) -> None:
    """Make this process's stdout and stderr those of a run: journalled, and `limit` bytes of each kept. None: undo."""
    for file in _files.values():
        file.journal, file.room = journal, limit
