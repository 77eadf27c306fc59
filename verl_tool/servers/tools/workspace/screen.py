"""What a terminal's output reads like as plain text."""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"""
    \x1b\[[0-?]*[ -/]*[@-~]            # CSI: colours, movements of the cursor
  | \x1b[\]PX^_].*?(?:\x07|\x1b\\|\Z)  # OSC and other strings: titles, links
  | \x1b[ -/]*[0-~]                    # all others
  | \x1b
    """,
    re.VERBOSE | re.DOTALL,
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def plain_text(data: bytes) -> str:
    """Output without escape codes. A line that was written over (by carriage returns) is as it was written last, and
    what a backspace took back is left out. Takes time linear in the length."""
    text = data.decode("utf-8", "replace")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "\r" in text:
        text = "\n".join(_overwritten(line) for line in text.split("\n"))
    if "\b" in text:
        text = _without_backspaces(text)
    return _CONTROL.sub("", text)


def _overwritten(line: str) -> str:
    """The last of the texts that were written to one line; what a shorter one leaves of a longer one is not kept."""
    written = [part for part in line.split("\r") if part]
    return written[-1] if written else ""


def _without_backspaces(text: str) -> str:
    characters: list[str] = []
    for character in text:
        if character != "\b":
            characters.append(character)
        elif characters and characters[-1] != "\n":
            characters.pop()
    return "".join(characters)


class HeadAndTail:
    """The beginning and the end of a stream of any length."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes kept, half of them from either end."""
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0
        """Bytes written."""

    def write(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._half:
            del self._tail[: -self._half]

    def take_over(self, before: HeadAndTail) -> None:
        """Begin with what another one has kept."""
        left_out = before.total - len(before._head) - len(before._tail)
        self.write(bytes(before._head))
        if left_out:
            self.write(b"\n[...]\n")
        self.write(bytes(before._tail))

    def text(self) -> str:
        """What was kept, with a mark where bytes are left out."""
        tail = self._tail[-self._half :]
        left_out = self.total - len(self._head) - len(tail)
        if not left_out:
            return plain_text(bytes(self._head + tail))
        return f"{plain_text(bytes(self._head))}\n[... {left_out} bytes left out ...]\n{plain_text(bytes(tail))}"
