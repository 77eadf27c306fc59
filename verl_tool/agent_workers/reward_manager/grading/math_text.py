r"""The form of a mathematical answer: its spelling, and whether it is a value, a list, a tuple, a set or a union.

Nothing of verl-tool is imported here, since the process that compares answers starts with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_UNICODE = {
    **{"\u2212": "-", "\u2013": "-", "\uff0d": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot "},
    **{"\u00f7": r"\div ", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge "},
    **{"\u2260": r"\ne ", "\u00b1": r"\pm ", "\u2213": r"\mp ", "\u00b0": r"^\circ ", "\u222a": r"\cup "},
    **{"\u2229": r"\cap ", "\u2205": r"\emptyset ", "\u2208": r"\in ", "\u00b2": "^{2}", "\u00b3": "^{3}"},
    **{"\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}", "\u03b8": r"\theta "},
    **{"\u03b1": r"\alpha ", "\u03b2": r"\beta ", "\u03bb": r"\lambda ", "\u211d": r"\mathbb{R}", "\u2026": r"\ldots "},
    **{"\uff0c": ",", "\u3001": ",", "\uff1b": ";", "\uff08": "(", "\uff09": ")", "\uff1d": "=", "\uff1a": ":"},
    **{"\uff0b": "+", "\u3002": ".", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u3000": " ", "\u2061": ""},
}
_TABLE = str.maketrans(_UNICODE)
_ROOT = re.compile(r"\u221a\s*(?:\{([^{}]*)\}|\(([^()]*)\)|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
_WRAPPED = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_SPACING = re.compile(
    r"(?<!\\)\\(?:left|right|displaystyle|limits|[bB]ig{1,2}[lrm]?|quad|qquad|[,;:!> ])(?![A-Za-z])|~"
)
_SIZED_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SAME = (
    (r"\varnothing", r"\emptyset"),
    (r"\leq", r"\le"),
    (r"\geq", r"\ge"),
    (r"\neq", r"\ne"),
    (r"\degree", r"^\circ"),
)
_WORDS = re.compile(r"\\(?:text(?:it|rm|bf|sf|tt|normal)?|mbox|mathrm|mathit|mathsf|operatorname|emph)\s*\{([^{}]*)\}")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]|\S", re.DOTALL)
_END = re.compile(r"(?<![.])[.,;]\s*$")
"""Punctuation behind an answer, but no ``0.333...``."""
_CIRCLE_OR_DEGREES = re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\bdegrees?|\\text\{\s*degrees?\s*\})\s*$")
_THOUSANDS = re.compile(r"(?:\\?\$)?[-+]?[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+(?:\.[0-9]+)?")
_LETTER = re.compile(r"[A-Za-z]")
MAX_ITEMS = 64
"""Of a list. A longer one must be the same text."""

_ALIASES = (
    *("cm centimeter centimeters centimetre centimetres", "m meter meters metre metres", "ft foot feet"),
    *("km kilometer kilometers kilometre kilometres", "mm millimeter millimeters", "in inch inches", "mi mile miles"),
    *("s sec secs second seconds", "min mins minute minutes", "h hr hrs hour hours", "g gram grams"),
    *(
        "kg kilogram kilograms",
        "l L liter liters litre litres",
        "mph",
        "deg degree degrees",
        "unit units",
        "yd yard yards",
    ),
    *("day days", "week weeks", "month months", "year years yr yrs", "dollar dollars usd", "cent cents", "euro euros"),
    *("people person persons", "way ways", "time times", "point points", "student students", "rad radian radians"),
    *("米", "厘米", "千米", "公里", "元", "个", "人", "度", "克", "千克", "小时", "分钟", "秒", "天", "岁", "种"),
)
_UNIT_OF = {name: names.split()[0] for names in _ALIASES for name in names.split()}
_SQUARED = re.compile(r"\s*(?:\^\s*\{?\s*([23])\s*\}?)\s*$")
_POWER_WORD = re.compile(r"\b(?:square|sq|cubic|cu)\b\.?", re.IGNORECASE)
_UNIT_AT_END = re.compile(
    r"(?<=[0-9}\)\]A-Za-z])\s*\\text\{\s*([^\d{}]+?)\s*\}$|(?<=[0-9}\)])\s*([A-Za-z]+|[\u4e00-\u9fff]{1,2})$"
)
_NO_UNIT = frozenset(
    [
        "or",
        "and",
        "not",
        "to",
        "no",
        "if",
        "for",
        "where",
        "when",
        "than",
        "more",
        "less",
        "least",
        "most",
        "at",
        "over",
        "under",
        "mod",
        "modulo",
        "base",
        "plus",
        "minus",
        "times",
        "half",
        "hundred",
        "thousand",
        "million",
        "billion",
        "trillion",
        "dozen",
        "percent",
        "quarter",
        "third",
        "twice",
        "negative",
        "i",
        "e",
        "x",
        "y",
        "z",
        "n",
        "k",
        "a",
        "b",
        "c",
        "pi",
        "hundreds",
        "thousands",
        "millions",
        "billions",
        "trillions",
        "dozens",
        "infinity",
        "undefined",
        "none",
        "any",
        "all",
        "is",
        "are",
        "but",
        "except",
        "odd",
        "even",
    ]
)
"""Words that change the number before them, or its meaning."""

Kind = Literal["value", "list", "tuple", "set", "union"]


@dataclass(frozen=True)
class Form:
    """What an answer is made of. `items` of a value is its text alone."""

    kind: Kind
    items: tuple[str, ...]
    brackets: str = ""
    """Of a tuple or an interval: ``(]``, say."""


def spell(text: str) -> str:
    """The answer as LaTeX in one of the ways to write it: no markup around it or within words, no spacing."""
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2] or found[3]}}}", text).translate(_TABLE).strip()
    text = _unwrapped(text)
    text = _SIZED_FRACTION.sub(lambda _: r"\frac", text)
    for name, same in _SAME:
        text = re.sub(re.escape(name) + r"(?![A-Za-z])", same.replace("\\", r"\\"), text)
    text = _SPACING.sub(" ", text)
    text = _WORDS.sub(lambda found: rf"\text{{{' '.join(found[1].split())}}}", text)
    return _unwrapped(_END.sub("", text).strip())


def words(text: str) -> str:
    r"""Its words alone, without ``\text`` around some of them."""
    return " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).casefold().split())


def _unwrapped(text: str) -> str:
    for opening, closing in _WRAPPED:
        inner = text[len(opening) : -len(closing)]
        wrapped = text == f"{opening}{inner}{closing}"
        if wrapped and inner and opening not in inner and closing not in inner:
            return inner.strip()
    return text


def tokens(text: str) -> list[str]:
    r"""Its parts without the space between them; words in ``\text`` are one. Two digits that are apart stay so."""
    found: list[str] = []
    for part in re.split(r"(\\text\{[^{}]*\})", text):
        if part.startswith(r"\text{"):
            found.append(part)
            continue
        end = -1
        for match in _TOKEN.finditer(part):
            apart = match.start() > end >= 0 and match.group().isdigit() and found[-1].isdigit()
            found.extend((" ", match.group()) if apart else (match.group(),))
            end = match.end()
    return found


def compact(text: str) -> str:
    """LaTeX with no more space than it needs."""
    joined = ""
    for part in tokens(text):
        joined += " " if re.search(r"\\[A-Za-z]+$", joined[-40:]) and _LETTER.match(part) else ""
        joined += part
    return joined


def form(text: str) -> Form:
    """The form of an answer as `spell` writes it."""
    text = text.strip()
    pieces = _split(text, r"\cup")
    if len(pieces) > 1:
        return Form("union", tuple(pieces))
    if text.startswith(r"\{") and text.endswith(r"\}") and _is_one_group(text, 2):
        return Form("set", tuple(_items(text[2:-2])))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _is_one_group(text, 1):
        inner = _split(text[1:-1], ",")
        if len(inner) > 1:
            return Form("tuple", tuple(inner), text[0] + text[-1])
    items = _items(text)
    return Form("list", tuple(items)) if len(items) > 1 else Form("value", tuple(items) or (text,))


def _items(text: str) -> list[str]:
    r"""The values of a list: ``1, 2``, ``1 or 2`` and ``\pm 1``. A number with commas at its thousands is one."""
    if _THOUSANDS.fullmatch(text.strip()):
        return [text.replace("{,}", ",").strip()]
    text = re.sub(r"\\text\{\s*(?:,?\s*(?:or|and))\s*\}|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])", ",", text)
    text = re.sub(r",(?:\s*,)+", ",", text)
    items = [piece for comma in _split(text, ",") for piece in _split(comma, ";")]
    return [sign for item in items for sign in _signs(item.strip())]


def _signs(item: str) -> list[str]:
    if item.count(r"\pm") != 1 or r"\mp" in item:
        return [item]
    before, after = item.split(r"\pm")
    return [f"{before}+{after}" if before.strip() else after.strip(), f"{before}-{after}"]


def _split(text: str, separator: str) -> list[str]:
    """Split where no bracket is open."""
    pieces, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if text.startswith((r"\{", r"\}"), i):
            depth += 1 if text[i + 1] == "{" else -1
            i += 2
            continue
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
        elif depth == 0 and text.startswith(separator, i):
            pieces.append(text[start:i])
            start = i + len(separator)
            i = start
            continue
        i += 1
    return [piece.strip() for piece in (*pieces, text[start:])]


def _is_one_group(text: str, width: int) -> bool:
    """Whether the bracket at the beginning is closed by that at the end, and not before."""
    depth, i = 0, 0
    while i < len(text):
        escaped = text.startswith((r"\{", r"\}"), i)
        char = text[i + 1] if escaped else text[i]
        depth += (char in "([{") - (char in ")]}")
        i += 2 if escaped else 1
        if depth == 0:
            return i == len(text)
    return False


def without_name(item: str) -> str:
    r"""An item without the unknown that it is the value of: ``x = 2``, ``x \in [1, 2]``."""
    return re.sub(r"^\s*[A-Za-z](?:_\{?\w\}?)?\s*(?:=|\\in(?![A-Za-z]))\s*", "", item)


def without_unit(item: str) -> tuple[str, str]:
    """A number without the unit behind it, and that unit in one of its spellings."""
    whole, degrees = _CIRCLE_OR_DEGREES.subn("", item)
    if degrees and whole.strip():
        return whole.strip(), "deg"
    power = _SQUARED.search(item)
    body = item[: power.start()] if power and r"\text" in item else item
    found = _UNIT_AT_END.search(body)
    if found is None:
        return item, ""
    words = (found[1] or found[2]).replace(".", " ").split()
    plain = found[1] is None
    known = [_UNIT_OF.get(word) or _UNIT_OF.get(word.lower()) for word in words if not _POWER_WORD.fullmatch(word)]
    if not words or len(words) > 3 or any(word.lower() in _NO_UNIT for word in words) or (plain and not all(known)):
        return item, ""
    if not re.search(r"[0-9}]\s*$|\\pi\s*$", body[: found.start()]) or not all(
        re.fullmatch(r"[^\W\d]+/?[^\W\d]*", w) for w in words
    ):
        return item, ""
    square = (
        2
        if re.search(r"\b(?:square|sq)\b", " ".join(words))
        else 3
        if re.search(r"\b(?:cubic|cu)\b", " ".join(words))
        else 1
    )
    degree = int(power[1]) if power and body is not item else square
    unit = " ".join(
        name or word.lower()
        for name, word in zip(known, (w for w in words if not _POWER_WORD.fullmatch(w)), strict=True)
    )
    return body[: found.start()].strip(), f"{unit}^{degree}" if degree > 1 else unit
