"""A training's console: a few lines there, and all that any of its processes prints in a file."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

LINE_WIDTH = 160
"""Columns of a line where the output is no terminal: longer ones are the reader's to wrap."""


@contextlib.contextmanager
def quiet_console(log: Path) -> Iterator[Console]:
    """A console on what stderr was before; until the block ends, all else that is printed goes to the end of `log`.

    That is what this process and those that it starts write to their outputs: Ray's lines of its workers, warnings of
    libraries, verl's own. Warnings of this package reach the console too.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with _outputs_to(log) as stderr, os.fdopen(stderr, "w", buffering=1, encoding="utf-8") as file:
        console = _console_on(file)
        handler = _ConsoleHandler(console)
        own = logging.getLogger("verl_tool")
        own.addHandler(handler)
        try:
            yield console
        finally:
            own.removeHandler(handler)


@contextlib.contextmanager
def loud_console() -> Iterator[Console]:
    """A console on stderr, among all that is printed there."""
    yield _console_on(sys.stderr)


def _console_on(file: object) -> Console:
    console = Console(file=file)  # type: ignore[arg-type]
    if not console.is_terminal:
        console.width = max(console.width, LINE_WIDTH)
    return console


@contextlib.contextmanager
def _outputs_to(log: Path) -> Iterator[int]:
    """Both outputs at the end of a file; gives a descriptor of what stderr was."""
    stored = [os.dup(number) for number in (1, 2)]
    try:
        _flush()
        with log.open("ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        yield os.dup(stored[1])
    finally:
        _flush()
        for number, old in zip((1, 2), stored, strict=True):
            os.dup2(old, number)
            os.close(old)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk must not hide the error that it led to
            stream.flush()


class _ConsoleHandler(logging.Handler):
    """Warnings and errors as a line each."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(f"{record.levelname.lower()}: {record.getMessage()}", markup=False, highlight=False)
