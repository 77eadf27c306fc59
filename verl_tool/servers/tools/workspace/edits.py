"""Edits of a text file: one string for another, lines put in, what they look like, and how to take them back."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

from verl_tool.sandbox.backends import WorkspaceSandbox
from verl_tool.servers.tools.base import CallError

SNIPPET_LINES = 4
"""Lines shown before and behind an edit."""
MAX_BYTES = 8 << 20
"""Of a file that is read or edited."""
MAX_KEPT_BYTES = 2 << 20
"""Of earlier contents of a workspace's files, compressed; the oldest are let go first."""


@dataclass(frozen=True)
class Text:
    """A file's content. Bytes that are no UTF-8 are kept as they are, and so is the kind of line breaks."""

    text: str
    """With line feeds; what is no UTF-8 as surrogates (PEP 383)."""
    crlf: bool = False
    """All its line breaks are a carriage return and a line feed."""

    @classmethod
    def of(cls, content: bytes, path: str) -> Text:
        """Raises CallError if it is no text, or too long."""
        if len(content) > MAX_BYTES:
            raise CallError(f"{path} has {len(content)} bytes; this tool takes files of up to {MAX_BYTES}")
        if b"\0" in content:
            raise CallError(f"{path} is a binary file; this tool takes text only")
        text = content.decode("utf-8", "surrogateescape")
        crlf = text.count("\n") == text.count("\r\n") > 0
        return cls(text.replace("\r\n", "\n") if crlf else text, crlf)

    def encoded(self) -> bytes:
        """As a file's content. Raises CallError if it holds what is no Unicode."""
        try:
            return (self.text.replace("\n", "\r\n") if self.crlf else self.text).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise CallError(f"the text holds {error.object[error.start]!r}, which is no character") from error

    def with_text(self, text: str) -> Text:
        """The same file with another text."""
        return Text(text, self.crlf)

    @property
    def lines(self) -> list[str]:
        """Without their line breaks; the one that ends the last line begins no further line."""
        return self.text.removesuffix("\n").split("\n") if self.text else []


@dataclass(frozen=True)
class Edited:
    """A file after an edit."""

    file: Text
    first: int
    """Number of the first line that the edit wrote, from 1."""
    last: int

    def snippet(self) -> str:
        """The lines of the edit and some around them."""
        return numbered(self.file.lines, max(1, self.first - SNIPPET_LINES), self.last + SNIPPET_LINES)


def numbered(lines: list[str], first: int = 1, last: int | None = None) -> str:
    """Lines with their numbers, as ``cat -n`` shows them."""
    shown = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines[first - 1 : last], first))
    return shown.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def replace_once(file: Text, old: str, new: str, path: str) -> Edited:
    """`new` in the place of `old`. Raises CallError unless `old` stands there exactly once."""
    old, new = (text.replace("\r\n", "\n") if file.crlf else text for text in (old, new))
    if not old:
        raise CallError("old_str is empty; give the text that is to be replaced")
    at = file.text.find(old)
    if at < 0:
        raise CallError(f"No replacement was performed, old_str `{old}` did not appear verbatim in {path}.")
    if file.text.find(old, at + 1) >= 0:
        raise CallError(
            f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines "
            f"{_lines_of(file.text, old)}. Please ensure it is unique"
        )
    first = file.text.count("\n", 0, at) + 1
    text = file.text[:at] + new + file.text[at + len(old) :]
    return Edited(file.with_text(text), first, first + new.count("\n"))


def insert_after(file: Text, line: int, text: str) -> Edited:
    """`text` as lines behind the line of that number; 0 puts it before the first. Raises CallError."""
    lines = file.lines
    if not 0 <= line <= len(lines):
        raise CallError(f"insert_line is {line}, and the file has {len(lines)} lines: give a number from 0 to that")
    text = (text.replace("\r\n", "\n") if file.crlf else text).removesuffix("\n")
    added = text.split("\n")
    ended = "\n" if file.text.endswith("\n") or not file.text else ""
    whole = "\n".join([*lines[:line], *added, *lines[line:]]) + ended
    return Edited(file.with_text(whole), line + 1, line + len(added))


def _lines_of(text: str, old: str) -> list[int]:
    found, at, line, counted = [], text.find(old), 1, 0
    while at >= 0:
        line, counted = line + text.count("\n", counted, at), at
        found.append(line)
        at = text.find(old, at + 1)
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class _Edit:
    path: str
    before: bytes | None
    """The file's content before, compressed; None if the edit made the file."""
    after: int
    """A hash of what the edit left."""


class Edits:
    """The edits of one workspace that can be taken back."""

    def __init__(self, session: WorkspaceSandbox) -> None:
        self._edits: deque[_Edit] = deque()
        self._kept = 0

    def copy_for(self, session: WorkspaceSandbox) -> Edits:
        """Those of a fork, which may be taken back in it as well."""
        copy = Edits(session)
        copy._edits, copy._kept = self._edits.copy(), self._kept
        return copy

    async def close(self) -> None:
        """Nothing is held that must be given back."""

    def add(self, path: str, before: bytes | None, after: bytes) -> None:
        """Remember an edit; `before` is None if it made the file."""
        packed = None if before is None else zlib.compress(before, 1)
        self._edits.append(_Edit(path, packed, hash(after)))
        self._kept += len(packed or b"")
        while self._kept > MAX_KEPT_BYTES:
            self._kept -= len(self._edits.popleft().before or b"")

    def last(self, path: str, now: bytes) -> bytes | None:
        """What the file held before its last edit; None if that made it. `taken_back` forgets the edit.

        Raises CallError if there is no edit of it, or if the content `now` is not what that edit left.
        """
        edit = self._find(path)
        if edit is None:
            raise CallError(f"there is no edit of {path} to undo")
        if edit.after != hash(now):
            raise CallError(f"{path} was changed since its last edit here, and undo_edit would lose that change")
        return None if edit.before is None else zlib.decompress(edit.before)

    def taken_back(self, path: str) -> None:
        """Its last edit is undone."""
        edit = self._find(path)
        if edit is not None:
            self._edits.remove(edit)
            self._kept -= len(edit.before or b"")

    def _find(self, path: str) -> _Edit | None:
        return next((edit for edit in reversed(self._edits) if edit.path == path), None)
