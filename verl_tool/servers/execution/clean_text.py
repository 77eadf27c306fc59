"""Remove characters from observations that act on a terminal or hide text from a reader."""

from __future__ import annotations

import re

_SEQUENCES = re.compile(
    r"""
    \x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]                     # CSI: colours, movements of the cursor
  | \x1b\][^\x00-\x08\x0a-\x1f\x7f]{0,4096}(?:\x07|\x1b\\)  # OSC: titles, links
  | \x1b[ -/]{0,8}[0-OQ-WYZ\\`-~]                      # others, without those that open a string
    """,
    re.VERBOSE,
)
_UNSAFE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # controls but tab, line feed and carriage return
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # marks that change the direction of text
)


_AT_ONCE = 1 << 15
"""Number of characters that are cleaned before other threads may run."""
_WRITTEN = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in range(0x2070) if _UNSAFE.match(chr(code))
}


def clean_text(text: str) -> str:
    """Remove terminal sequences from `text`, and escape other control characters and marks of direction as in Python,
    ``\\x00`` or ``\\u202e``. Takes time linear in the length."""
    if _UNSAFE.search(text) is None:
        return text
    if len(text) > _AT_ONCE:
        # A sequence across two parts is escaped instead of removed.
        return "".join(clean_text(text[at : at + _AT_ONCE]) for at in range(0, len(text), _AT_ONCE))
    if "\x1b" in text:
        text = _SEQUENCES.sub("", text)
    return text.translate(_WRITTEN)
