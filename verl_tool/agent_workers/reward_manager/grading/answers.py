"""Find the final answer in what the model wrote. Each function takes time linear in the length of its text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

_FENCE = re.compile(r"(`{3,})[ \t]*([^`]*)$")
"""The last fence of a line, and the text after it."""
_PYTHON = re.compile(r"(?:python|py|pypy)[23]?(?:\.\d+)?", re.IGNORECASE)
_INLINE = re.compile(r"```[ \t]*(?:python|py|pypy)[23]?(?:\.\d+)?[ \t]+([^`]+)```[^`]*$", re.IGNORECASE)
_LOOP = r"for[ \t][^\n:]{1,80}[ \t]in[ \t][^\n]{1,400}:"
_STATEMENT = re.compile(
    r"(?:(?:async[ \t]+)?def[ \t]+\w+[ \t]*[(\[]|class[ \t]+\w+[^\n]*:|import[ \t]+\w|@\w|"
    r"from[ \t]+[\w.]+[ \t]+import\b|" + _LOOP + r"|(?:while|if|with|try)\b[^\n]*:|"
    r"print[ \t]*\(|[\w.]+(?:[ \t]*,[ \t]*[\w.]+)*[ \t]+=[ \t]+\S|[\w.]+\()"
)
"""Possible beginnings of a line of a program, but not of the words after a fence or of a file name."""
_PROGRAM = re.compile(
    r"^[ \t]*(?:(?:async[ \t]+)?def[ \t]+\w|class[ \t]+\w|import[ \t]+\w|from[ \t]+[\w.]+[ \t]+import|@\w|"
    + _LOOP
    + r"|while\b[^\n]*:)|^(?:with|try)\b[^\n]*:|^print[ \t]*\(|\blambda\b|\binput[ \t]*\(|\bsys\.stdin\b",
    re.MULTILINE,
)
"""Found in programs, but rarely in a sample of output or a list of calls."""
_MAYBE_PROGRAM = re.compile(r"^(?:[ \t]*(?:if\b.*:|[\w.]+\()|[\w.,\[\] \t*]+=[^=\n].*\()", re.MULTILINE)
"""Found in short programs, and also in lists of calls."""
_SESSION = re.compile(
    r"\A\s*(?:>>>[ \t]|\$[ \t]|In \[\d+\]:|File \"[^\"\n]*\", line \d)|^Traceback \(most recent call", re.MULTILINE
)
"""Found in the record of a run, such as an interactive session or a traceback."""
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\$?(?P<sign2>[-+]?)"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?P<power>[eE][-+]?[0-9]{1,3})?%?\.?"
)
_OF_NUMBERS = re.compile(r"[\w.,$%+-]")
"""Characters that may belong to a number. A number ends only at other characters."""
_MAX_NUMBER_CHARACTERS = 400
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
"""Maximum number of boxes that form one answer."""


def last_code_block(turns: Sequence[str]) -> str | None:
    """Return the last fenced block of Python in the latest turn that has a program. None if there is none.

    Blocks labelled as Python are preferred. A block without a label is used if it looks like a program, so that a
    sample of output or of calls is not mistaken for the answer. A labelled block may be cut by the end of the turn. As
    in verl's `prime_code` and LiveCodeBench, text may precede the opening fence on its line, code may precede the
    closing one, and the first line of the code may follow the opening one.
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
    """A fenced block. `language` is the first word after the fence."""

    language: str
    fence: int
    """Number of backticks at its beginning, and minimum number at its end."""
    indented: bool
    lines: list[str]
    closed: bool = False

    @property
    def code(self) -> str:
        """Its text. A block in a list is indented as a whole, which is removed."""
        text = "".join(f"{line}\n" for line in self.lines)
        return textwrap.dedent(text) if self.indented else text


def _blocks(text: str) -> list[_Block]:
    """Return the fenced blocks. The last one may be open."""
    blocks: list[_Block] = []
    block: _Block | None = None
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        found = _FENCE.search(line) if "```" in line else None
        if block is None:
            inline = _INLINE.search(line) if found else None
            if inline and _STATEMENT.match(inline[1].strip()):
                blocks.append(_Block("python", 3, False, [inline[1].strip()], closed=True))
            elif found and line.count("```") % 2:
                block = _open_block(line, found)
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
        block = _open_block(line, found) if opens else None
    if block is not None:
        blocks.append(block)
    return blocks


def _open_block(line: str, found: re.Match[str]) -> _Block:
    """Begin a block with this line, whose fence may be followed by the first line of the code."""
    language, *_ = found[2].split() or [""]
    code = found[2].strip()
    if _PYTHON.fullmatch(language):
        code = code[len(language) :].lstrip()
    elif language and _STATEMENT.match(code):
        language = ""
    lines = [code] if code and _STATEMENT.match(code) else []
    return _Block(language.partition("{")[0], len(found[1]), line[:1] in (" ", "\t"), lines)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{…}``. Braces inside must match; ``\{`` and ``\}`` are text.

    Different boxes that are separated only by "and", "or" and punctuation form one answer: ``\boxed{7} or \boxed{8}``
    is "7, 8". This prevents an answer from counting both as a list and as its last item.
    """
    boxes = _boxes(text)
    return None if not boxes else boxes[0] if len(set(boxes)) == 1 else ", ".join(boxes)


def last_boxes(text: str) -> list[str]:
    r"""Return the contents of the last boxes that are separated only by "and", "or" and punctuation.

    Empty if there is no box, or more than `MAX_BOXES`.
    """
    found = _boxes(text)
    return found if len(found) <= MAX_BOXES else []


def last_box_start(text: str) -> int:
    """Return the position of the last box, -1 if there is none."""
    return max((found.start() for found in _BOX.finditer(text)), default=-1)


def _boxes(text: str) -> list[str]:
    """Return the contents of the boxes at the end, at most one more than `MAX_BOXES`."""
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
    """Return the content of the last complete ``<tag>…</tag>``, None if there is none."""
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, content = before.rpartition(f"<{tag}>")
    return content.strip() if closing and opening else None


def last_number(text: str) -> Decimal | None:
    """Return the last number. ``1,234``, ``$5``, ``.5`` and ``50%`` are 1234, 5, 0.5 and 50.

    None if the last digits belong to something else: ``7_2``, ``3-4``, ``v2``.
    """
    end = next((i + 1 for i in range(len(text) - 1, -1, -1) if text[i].isnumeric()), 0)
    if end == 0:
        return None
    start = end
    while start > 0 and end - start <= _MAX_NUMBER_CHARACTERS and _OF_NUMBERS.match(text[start - 1]):
        start -= 1
    while end < len(text) and end - start <= _MAX_NUMBER_CHARACTERS and _OF_NUMBERS.match(text[end]):
        end += 1
    return as_number(text[start:end].rstrip(",-."))


def as_number(text: str) -> Decimal | None:
    r"""Parse the whole text as a number in ASCII digits, None if it is not one. Commas may separate thousands.

    Ignores ``$``, ``%``, a final full stop, and LaTeX's ``\$``, ``\%``, ``{,}``, ``\,`` and ``\text{}`` around it.
    """
    if len(text) > _MAX_NUMBER_CHARACTERS:
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
    """Return the text before the first closing brace without an opening one, None if there is no such brace."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match.group() in "{}":
            depth += 1 if match.group() == "{" else -1
            if depth == 0:
                return text[: match.start()]
    return None
