"""Finding the final answer in what the model wrote. Each function reads its text once, whatever the text is."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

_FENCE = re.compile(r"(`{3,})[ \t]*([^`]*)$")
"""The last fence of a line, and what stands behind it."""
_PYTHON = re.compile(r"(?:python|py|pypy)[23]?(?:\.\d+)?", re.IGNORECASE)
_INLINE = re.compile(r"```[ \t]*(?:python|py|pypy)[23]?(?:\.\d+)?[ \t]+([^`]+)```[^`]*$", re.IGNORECASE)
_LOOP = r"for[ \t][^\n:]{1,80}[ \t]in[ \t][^\n]{1,400}:"
_STATEMENT = re.compile(
    r"(?:(?:async[ \t]+)?def[ \t]+\w+[ \t]*[(\[]|class[ \t]+\w+[^\n]*:|import[ \t]+\w|@\w|"
    r"from[ \t]+[\w.]+[ \t]+import\b|" + _LOOP + r"|(?:while|if|with|try)\b[^\n]*:|"
    r"print[ \t]*\(|[\w.]+(?:[ \t]*,[ \t]*[\w.]+)*[ \t]+=[ \t]+\S|[\w.]+\()"
)
"""How a line of a program may begin, and the words behind a fence or the name of a file do not."""
_PROGRAM = re.compile(
    r"^[ \t]*(?:(?:async[ \t]+)?def[ \t]+\w|class[ \t]+\w|import[ \t]+\w|from[ \t]+[\w.]+[ \t]+import|@\w|"
    + _LOOP
    + r"|while\b[^\n]*:)|^(?:with|try)\b[^\n]*:|^print[ \t]*\(|\blambda\b|\binput[ \t]*\(|\bsys\.stdin\b",
    re.MULTILINE,
)
"""What a program has, and a sample of its output or a list of calls hardly ever."""
_MAYBE_PROGRAM = re.compile(r"^(?:[ \t]*(?:if\b.*:|[\w.]+\()|[\w.,\[\] \t*]+=[^=\n].*\()", re.MULTILINE)
"""A line that a short program has, and a list of its calls too."""
_SESSION = re.compile(
    r"\A\s*(?:>>>[ \t]|\$[ \t]|In \[\d+\]:|File \"[^\"\n]*\", line \d)|^Traceback \(most recent call", re.MULTILINE
)
"""How the record of a run begins, or what stands in it."""
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
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SPACE = r"(?:[\s$.*&]|\\[()\[\]!: ]|\\\\|\\q?quad(?![A-Za-z]))"
_MARK = (
    r"(?:or[\s$]{1,4}[A-Za-z](?:_\{?\w\}?)?\s{0,4}=|[,;]|\\[,;]|and|or|/|"
    r"\\(?:text|mbox|mathrm)\s*\{\s*,?\s*(?:and|or)?\s*,?\s*\})"
)
_BETWEEN_BOXES = re.compile(rf"{_SPACE}{{0,16}}(?:{_MARK}{_SPACE}{{0,16}}){{0,4}}")
MAX_BOXES = 16
"""Boxes that are one answer together."""


def last_code_block(turns: Sequence[str]) -> str | None:
    """The last fenced block of Python in the latest turn that has a program.

    Blocks that are labelled as Python come before those without a label, of which only one that looks like a program is
    taken, so that a sample of the output or of the calls is none. A block that the turn's end cuts counts if it is
    labelled. As verl's `prime_code` and LiveCodeBench have it, a fence may stand behind text on its line, and code
    before the closing one; the first line of the code may stand behind the opening one.
    """
    unlabelled = None
    for turn in reversed(turns):
        blocks = _blocks(turn)
        labelled = [block.code for block in blocks if _PYTHON.fullmatch(block.language)]
        if labelled:
            return ([code for code in labelled if not _SESSION.search(code)] or labelled)[-1]
        plain = [block.code for block in blocks if not block.language and block.closed]
        for kind in (_PROGRAM, _MAYBE_PROGRAM):
            programs = [code for code in plain if kind.search(code) and not _SESSION.search(code)]
            if programs:
                return programs[-1]
        unlabelled = unlabelled or (plain[-1] if plain else None)
    return unlabelled


@dataclass
class _Block:
    """A fenced block: `language` is the first word behind the fence."""

    language: str
    fence: int
    """How many backticks it begins with; at least as many end it."""
    indented: bool
    lines: list[str]
    closed: bool = False

    @property
    def code(self) -> str:
        """Its text; a block that stands in a list is indented as a whole."""
        text = "".join(f"{line}\n" for line in self.lines)
        return textwrap.dedent(text) if self.indented else text


def _blocks(text: str) -> list[_Block]:
    """The fenced blocks, the last one open if nothing closes it."""
    blocks: list[_Block] = []
    block: _Block | None = None
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        found = _FENCE.search(line) if "```" in line else None
        if block is None:
            inline = _INLINE.search(line) if found else None
            if inline and _STATEMENT.match(inline[1].strip()):
                blocks.append(_Block("python", 3, False, [inline[1].strip()], closed=True))
            elif found and line.count("```") % 2:
                block = _opened(line, found)
            continue
        if found is None or len(found[1]) < block.fence:
            block.lines.append(line)
            continue
        before, behind = line[: found.start()], found[2].split()
        if before.strip() and (behind or line.count("```") % 2 == 0):
            block.lines.append(line)  # backticks in the code
            continue
        if before.strip():
            block.lines.append(before)
        block.closed = True
        blocks.append(block)
        opens = len(behind) == 1 or (behind and _PYTHON.fullmatch(behind[0]))
        block = _opened(line, found) if opens else None
    if block is not None:
        blocks.append(block)
    return blocks


def _opened(line: str, found: re.Match[str]) -> _Block:
    """A block that begins with this line, behind the fence of which the first line of the code may stand."""
    language, *_ = found[2].split() or [""]
    code = found[2].strip()
    if _PYTHON.fullmatch(language):
        code = code[len(language) :].lstrip()
    elif language and _STATEMENT.match(code):
        language = ""
    lines = [code] if code and _STATEMENT.match(code) else []
    return _Block(language.partition("{")[0], len(found[1]), line[:1] in (" ", "\t"), lines)


def last_boxed(text: str) -> str | None:
    r"""What the last complete ``\boxed{…}`` holds; braces inside must match, ``\{`` and ``\}`` are text.

    Different boxes with no more than "and", "or" and punctuation between them are one answer: ``\boxed{7} or
    \boxed{8}`` is "7, 8". So an answer cannot be read in two ways, as a list and as its last item.
    """
    boxes = _boxes(text)
    return None if not boxes else boxes[0] if len(set(boxes)) == 1 else ", ".join(boxes)


def last_boxes(text: str) -> list[str]:
    r"""What the boxes at the end hold between which there is no more than "and", "or" and punctuation: ``\boxed{1}``
    and ``\boxed{2}``. Empty if there is none, or more than `MAX_BOXES`."""
    found = _boxes(text)
    return found if len(found) <= MAX_BOXES else []


def last_box_start(text: str) -> int:
    """Where the last box begins; -1 if there is none."""
    return max((found.start() for found in _BOX.finditer(text)), default=-1)


def _boxes(text: str) -> list[str]:
    """What each of the boxes at the end holds, at most one more than `MAX_BOXES`."""
    found: list[str] = []
    after = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        content = _until_brace(text[box.end() : after])
        if content is None:
            if found:
                break
            after = box.start()
            continue
        between = text[box.end() + len(content) + 1 : after]
        if found and not _BETWEEN_BOXES.fullmatch(between):
            break
        found.insert(0, content.strip())
        after = box.start()
        if len(found) > MAX_BOXES:
            break
    return found


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
