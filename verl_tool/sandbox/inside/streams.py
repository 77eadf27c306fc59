"""The run's stdout and stderr: files of the pool, with a journal of the order of writes."""

from __future__ import annotations

import io
import os
import sys

from . import wire


class Journal:
    """Records each change from one stream to the other (see `wire.JOURNAL_BYTES`)."""

    def __init__(self, words: memoryview) -> None:
        """`words`: the journal as unsigned 64-bit words, shared with the pool."""
        self._words = words
        self.current = 1

    def switch(self, fd: int) -> None:
        """Record the position of the other stream. When the journal is full, the order is lost."""
        left = self.current
        flush(left)  # a partial line in it precedes this write
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
        """Record that `size` bytes were written to `fd` beyond the limit."""
        self._words[wire.DROPPED_OUT + fd - 1] += size


class OutputFile(io.FileIO):
    """File descriptor 1 or 2. It writes up to the limit and counts the rest, so that printing never fails."""

    journal: Journal | None = None
    remaining = 0

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self._fd = fd

    def write(self, data, /):
        """Implement `io.RawIOBase.write`, and report all of `data` as written at the limit."""
        journal = self.journal
        if journal is None:
            return super().write(data)
        if journal.current != self._fd:
            journal.switch(self._fd)
        size = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        if size <= self.remaining:
            written = super().write(data)
            self.remaining -= written
            return written
        written = super().write(memoryview(data).cast("B")[: self.remaining]) if self.remaining else 0
        self.remaining -= written
        if self.remaining == 0:
            journal.drop(self._fd, size - written)
            return size
        return written


_STREAM_NAMES = {1: "stdout", 2: "stderr"}
_opened: dict[int, io.TextIOWrapper] = {}
"""The streams of `open_output` by file descriptor."""
_files: dict[int, OutputFile] = {}
"""The files below the streams, even if the user's code has detached them."""


def flush(fd: int) -> None:
    """Flush the stream on file descriptor 1 or 2."""
    try:
        _opened[fd].flush()
    except (OSError, ValueError):  # the user's code closed it
        return


def open_output(fd: int) -> io.TextIOWrapper:
    """Open a line-buffered text stream on `fd`, so that output before a kill is not lost."""
    _files[fd] = OutputFile(fd)
    buffer = io.BufferedWriter(_files[fd])
    stream = io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    stream.mode = "w"  # type: ignore[misc]
    _opened[fd] = stream
    return stream


def open_outputs() -> None:
    """Replace Python's stdout and stderr."""
    for fd, name in _STREAM_NAMES.items():
        stream = open_output(fd)
        for attribute in (name, f"__{name}__"):
            setattr(sys, attribute, stream)


def reopen() -> None:
    """Reopen the streams, and their replacements in `sys`, that the user's code has closed or detached."""
    for fd, name in _STREAM_NAMES.items():
        if _is_closed(_opened[fd]):
            setattr(sys, f"__{name}__", open_output(fd))
        if _is_closed(getattr(sys, name, None)):
            setattr(sys, name, _opened[fd])


def _is_closed(stream: object) -> bool:
    try:
        return stream is None or getattr(stream, "closed", False) is True
    except Exception:  # noqa: BLE001  (a detached stream raises ValueError, a replacement anything)
        return True


def attach(journal: Journal | None, limit: int) -> None:
    """Start to record this process's stdout and stderr in a journal, with at most `limit` bytes each. None: stop."""
    for file in _files.values():
        file.journal, file.remaining = journal, limit
