"""Finding the final answer in what the model wrote. Each function reads its text once, whatever the text is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

_FENCED = re.compile(r"^[ \t]*```([\w+-]*)[ \t]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_PYTHON = frozenset({"", "python", "python3", "py"})
_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(?:\.\d+)?%?")
_BOXED = "\\boxed{"


def last_code_block(turns: Sequence[str]) -> str | None:
    """The last closed fenced block of Python, or of no language, in the latest turn that has one."""
    for turn in reversed(turns):
        blocks = [block for language, block in _FENCED.findall(turn) if language.lower() in _PYTHON]
        if blocks:
            return blocks[-1]
    return None


def last_boxed(text: str) -> str | None:
    r"""What the last complete ``\boxed{…}`` holds; braces inside must match, ``\{`` and ``\}`` are text."""
    end = len(text)
    while (start := text.rfind(_BOXED, 0, end)) >= 0:
        content = _until_brace(text[start + len(_BOXED) : end])
        if content is not None:
            return content.strip()
        end = start
    return None


def last_tagged(text: str, tag: str) -> str | None:
    """What the last complete ``<tag>…</tag>`` holds."""
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, content = before.rpartition(f"<{tag}>")
    return content.strip() if closing and opening else None


def last_number(text: str) -> Decimal | None:
    """The last number; ``1,234``, ``$5`` and ``50%`` are 1234, 5 and 50."""
    found = None
    for match in _NUMBER.finditer(text):
        found = match.group()
    return None if found is None else as_number(found)


def as_number(text: str) -> Decimal | None:
    """The number that the text is, without thousands' commas, ``$``, ``%`` and a full stop at its end."""
    cleaned = text.strip().rstrip(".").rstrip("%").replace(",", "").replace("$", "")
    try:
        number = Decimal(cleaned)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _until_brace(text: str) -> str | None:
    """The text before the brace that closes what was open before it began."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match.group() in "{}":
            depth += 1 if match.group() == "{" else -1
            if depth == 0:
                return text[: match.start()]
    return None
