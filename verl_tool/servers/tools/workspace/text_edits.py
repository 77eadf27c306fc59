"""Edits of a text file: one string for another, lines put in, what they look like, and how to take them back.

Plain functions of bytes. Large files are edited in a process of their own (`edits.Editor`), which runs this file as a
program: standard library only, no import of this project.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

SNIPPET_LINES = 4
"""Lines shown before and behind an edit."""
MAX_BYTES = 8 << 20
"""Of a file that is read or edited."""
MAX_LISTED_LINES = 20
"""Of those in which a text stands that was to stand there once."""


class EditError(ValueError):
    """What cannot be edited or shown; the message is for the model."""


class InvalidEdit(EditError):
    """Arguments that make no sense for the file."""


def check_size(content: bytes, path: str) -> bytes:
    """`content`. Raises EditError if it is too long."""
    if len(content) > MAX_BYTES:
        raise EditError(f"{path} has {len(content)} bytes; this tool takes files of up to {MAX_BYTES}")
    return content


@dataclass(frozen=True)
class Text:
    """A file's content. Bytes that are no UTF-8 are kept as they are, and so is the kind of line breaks."""

    text: str
    """With line feeds; what is no UTF-8 as surrogates (PEP 383)."""
    crlf: bool = False
    """All its line breaks are a carriage return and a line feed."""

    @classmethod
    def of(cls, content: bytes, path: str) -> Text:
        """Raises EditError if it is no text, or too long."""
        check_size(content, path)
        if b"\0" in content:
            raise EditError(f"{path} is a binary file; this tool takes text only")
        text = content.decode("utf-8", "surrogateescape")
        crlf = text.count("\n") == text.count("\r\n") > 0
        return cls(text.replace("\r\n", "\n") if crlf else text, crlf)

    def encoded(self) -> bytes:
        """As a file's content. Raises EditError if it holds what is no Unicode."""
        try:
            return (self.text.replace("\n", "\r\n") if self.crlf else self.text).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise EditError(f"the text holds {error.object[error.start]!r}, which is no character") from error

    def with_text(self, text: str) -> Text:
        """The same file with another text."""
        return Text(text, self.crlf)

    @property
    def lines(self) -> list[str]:
        """Without their line breaks; the one that ends the last line begins no further line."""
        return self.text.removesuffix("\n").split("\n") if self.text else []


@dataclass(frozen=True)
class Edited:
    file: Text
    first: int
    """Number of the first line that the edit wrote, from 1."""
    last: int

    def snippet(self, limit: int) -> str:
        """The lines of the edit and some around them, as `numbered` shows them."""
        return numbered(self.file.lines, max(1, self.first - SNIPPET_LINES), self.last + SNIPPET_LINES, limit)


def numbered(lines: Sequence[str], first: int, last: int | None, limit: int) -> str:
    """Lines with their numbers, as ``cat -n`` shows them; if that has more than `limit` characters, the beginning and
    the end of it around a mark. What is left out is not built."""
    last = len(lines) if last is None else min(last, len(lines))
    total = sum(len(line) for line in islice(lines, first - 1, last)) + _label_characters(first, last)
    if total <= limit:
        return _join_lines(_label(lines, number) for number in range(first, last + 1))
    head, tail = _collect(lines, range(first, last + 1), limit), _collect(lines, range(last, first - 1, -1), limit)
    half = limit // 2
    ending = _join_lines(reversed(tail))
    return f"{_join_lines(head)[:half]}\n[... {total - limit} characters left out ...]\n{ending[half - limit :]}"


def _collect(lines: Sequence[str], numbers: range, characters: int) -> list[str]:
    """The first of these lines, as many as have so many characters together."""
    labelled = []
    for number in numbers:
        labelled.append(_label(lines, number))
        characters -= len(labelled[-1]) + 1
        if characters < 0:
            break
    return labelled


def _label(lines: Sequence[str], number: int) -> str:
    return f"{number:6}\t{lines[number - 1]}"


def _label_characters(first: int, last: int) -> int:
    """Characters of the numbers from `first` to `last`, with the tabs behind them and the line breaks between."""
    count = max(0, last - first + 1)
    wider = sum(max(0, last - max(first, 10**digits) + 1) for digits in range(6, len(str(last))))
    return count * 7 + wider + max(0, count - 1)


def _join_lines(labelled: Any) -> str:
    return "\n".join(labelled).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def replace_once(file: Text, old: str, new: str, path: str) -> Edited:
    """`new` in the place of `old`. Raises EditError unless `old` stands there exactly once."""
    old, new = (text.replace("\r\n", "\n") if file.crlf else text for text in (old, new))
    if not old:
        raise EditError("old_str is empty; give the text that is to be replaced")
    at = file.text.find(old)
    if at < 0:
        raise EditError(f"No replacement was performed, old_str `{old}` did not appear verbatim in {path}.")
    if file.text.find(old, at + 1) >= 0:
        raise EditError(
            f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines "
            f"{_lines_of(file.text, old)}. Please ensure it is unique"
        )
    first = file.text.count("\n", 0, at) + 1
    text = file.text[:at] + new + file.text[at + len(old) :]
    return Edited(file.with_text(text), first, first + new.count("\n"))


def insert_after(file: Text, line: int, text: str) -> Edited:
    """`text` as lines behind the line of that number; 0 puts it before the first. Raises EditError."""
    lines = file.lines
    if not 0 <= line <= len(lines):
        raise EditError(f"insert_line is {line}, and the file has {len(lines)} lines: give a number from 0 to that")
    text = (text.replace("\r\n", "\n") if file.crlf else text).removesuffix("\n")
    added = text.split("\n")
    finished = "\n" if file.text.endswith("\n") or not file.text else ""
    whole = "\n".join([*lines[:line], *added, *lines[line:]]) + finished
    return Edited(file.with_text(whole), line + 1, line + len(added))


def _lines_of(text: str, old: str) -> str:
    """The first lines in which `old` begins, in words."""
    found: list[int] = []
    at, line, valid = text.find(old), 1, 0
    while at >= 0 and len(found) <= MAX_LISTED_LINES:
        line, valid = line + text.count("\n", valid, at), at
        found.append(line)
        following = text.find("\n", at)
        at = -1 if following < 0 else text.find(old, following + 1 if old[0] != "\n" else max(following, at + 1))
    numbers = ", ".join(map(str, found[:MAX_LISTED_LINES]))
    return f"[{numbers}, …]" if len(found) > MAX_LISTED_LINES else f"[{numbers}]"


# What the tool asks for: bytes of files in, bytes and words for the model out.


def view(content: bytes, path: str, view_range: list[int] | None, limit: int) -> str:
    """A file's lines, or those from the first to the last of `view_range`. Raises EditError."""
    lines = Text.of(content, path).lines
    first, last = _range(view_range, len(lines))
    return numbered(lines, first, last, limit) or "(the file is empty)"


def replace(content: bytes, path: str, old: str, new: str, limit: int) -> tuple[bytes, bytes, bytes, str]:
    """The new content, the old one packed, a digest of the new one, and the snippet. Raises EditError."""
    return _outcome(content, replace_once(Text.of(content, path), old, new, path), path, limit)


def insert(content: bytes, path: str, line: int, text: str, limit: int) -> tuple[bytes, bytes, bytes, str]:
    """As `replace`."""
    return _outcome(content, insert_after(Text.of(content, path), line, text), path, limit)


def undo(packed: bytes | None, after: bytes, now: bytes, path: str, limit: int) -> tuple[bytes | None, str]:
    """What the file held before, and what it reads then; None if the edit made it. `after`: the digest of what the edit
    left. Raises EditError if the content `now` is another."""
    if digest(now) != after:
        raise EditError(f"{path} was changed since its last edit here, and undo_edit would lose that change")
    if packed is None:
        return None, ""
    before = zlib.decompress(packed)
    return before, numbered(Text.of(before, path).lines, 1, None, limit)


def digest(content: bytes) -> bytes:
    """By which a content is known again."""
    return hashlib.blake2b(content, digest_size=16).digest()


def _outcome(content: bytes, edited: Edited, path: str, limit: int) -> tuple[bytes, bytes, bytes, str]:
    changed = edited.file.encoded()
    if len(changed) > MAX_BYTES:
        raise EditError(f"{path} would have {len(changed)} bytes; this tool takes files of up to {MAX_BYTES}")
    return changed, zlib.compress(content, 1), digest(changed), edited.snippet(limit)


def _range(given: list[int] | None, count: int) -> tuple[int, int | None]:
    """First and last line to show. Raises InvalidEdit."""
    if given is None:
        return 1, None
    if len(given) != 2:
        raise InvalidEdit(f"view_range has {len(given)} entries; give two numbers: the first and the last line")
    first, last = given
    if not 1 <= first <= max(count, 1) or (last != -1 and last < first):
        raise InvalidEdit(
            f"view_range is {given}, and the file has {count} lines: give 1 <= first <= last, or -1 as last"
        )
    return first, None if last == -1 else last


FUNCTIONS: dict[str, Callable[..., Any]] = {"view": view, "replace": replace, "insert": insert, "undo": undo}


def answer(name: str, arguments: Sequence[Any]) -> tuple[str, Any]:
    """The outcome of a function, or what was wrong."""
    try:
        return "done", FUNCTIONS[name](*arguments)
    except EditError as error:
        return type(error).__name__, str(error)


def main() -> None:
    """Answer until stdin ends: a name and arguments in, an outcome out, each by `marshal` behind its length."""
    import marshal
    import sys

    source, target = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(8):
        outcome = marshal.dumps(answer(*marshal.loads(source.read(int.from_bytes(header, "little")))))
        target.write(len(outcome).to_bytes(8, "little") + outcome)
        target.flush()


if __name__ == "__main__":
    main()
