"""Finding the final answer in what the model wrote. Each function reads its text once, whatever the text is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

_FENCED = re.compile(r"^[ \t]*```([\w+-]*)[ \t]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_PYTHON = frozenset({"", "python", "python3", "py"})
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\$?(?P<sign2>[-+]?)"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?P<power>[eE][-+]?[0-9]{1,3})?%?\.?"
)
_OF_NUMBERS = re.compile(r"[\w.,$%+-]")
"""Characters of which a number stands apart only if none of another kind is beside it."""
_LONGEST_NUMBER = 400
"""Characters."""
_LATEX = str.maketrans({"\u2212": "-"})
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}")
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
    """The last number; ``1,234``, ``$5``, ``.5`` and ``50%`` are 1234, 5, 0.5 and 50.

    None if the last digits stand in what is no number: ``7_2``, ``3-4``, ``v2``.
    """
    end = next((i + 1 for i in range(len(text) - 1, -1, -1) if text[i].isnumeric()), 0)
    if end == 0:
        return None
    start = end
    while start > 0 and end - start <= _LONGEST_NUMBER and _OF_NUMBERS.match(text[start - 1]):
        start -= 1
    while end < len(text) and end - start <= _LONGEST_NUMBER and _OF_NUMBERS.match(text[end]):
        end += 1
    return as_number(text[start:end].rstrip(",-."))


def as_number(text: str) -> Decimal | None:
    r"""The number that the text is as a whole, in digits of ASCII; ``1,234`` has its commas where thousands are.

    ``$``, ``%``, a full stop behind it, and LaTeX's ``\$``, ``\%``, ``{,}``, ``\,`` and ``\text{}`` around it are left
    out.
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    cleaned = text.strip().translate(_LATEX)
    whole = _TEXT.fullmatch(cleaned)
    cleaned = (whole[1] if whole else cleaned).strip()
    if len(cleaned) > 1 and cleaned[0] == cleaned[-1] == "$":
        cleaned = cleaned[1:-1].strip()
    for latex, plain in (("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\,", ","), ("\\!", "")):
        cleaned = cleaned.replace(latex, plain)
    found = _NUMBER.fullmatch(cleaned.replace(" %", "%"))
    if found is None or (found["sign"] and found["sign2"]):
        return None
    digits = found["digits"].replace(",", "")
    return Decimal(f"{found['sign']}{found['sign2']}{digits}{found['power'] or ''}")


def _until_brace(text: str) -> str | None:
    """The text before the brace that closes what was open before it began."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match.group() in "{}":
            depth += 1 if match.group() == "{" else -1
            if depth == 0:
                return text[: match.start()]
    return None
