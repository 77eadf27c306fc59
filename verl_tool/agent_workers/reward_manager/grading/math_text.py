r"""The form of a mathematical answer: its spelling, and whether it is a value, a list, a tuple, a set or a union.

Nothing of verl-tool is imported here, since the process that compares answers starts with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
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
_FONT = re.compile(r"\\(?:bf|rm|it|sf|tt|bfseries|itshape|mathbf|boldsymbol|bm)(?![A-Za-z])\s*")
"""Switches of a font: ``{\\bf 2}``."""
_SIGNS = re.compile(r"\\text\{([^A-Za-z{}\u4e00-\u9fff]*)\}|\{(:)\}")
"""What stands in ``\\text`` or in braces for no word: ``\\text{:}``."""
_APART = re.compile(r"(?<=[0-9])\\[,!:;]\s*(?=[0-9]{3}(?![0-9]))")
"""Between the thousands of a number."""
_APART_BY_BLANKS = re.compile(r"[-+]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
_CHOOSE = re.compile(
    r"\{\s*((?:[^{}]|\{[^{}]{0,40}\}){1,40}?)\s*\\choose(?![A-Za-z])\s*((?:[^{}]|\{[^{}]{0,40}\}){1,40}?)\s*\}"
)
_BARE_BINOMIAL = re.compile(r"\\binom\s*([0-9])\s*([0-9])(?![0-9])")
_FACTOR = re.compile(r"(?<=[0-9})!])\s*(?=\\binom)")
"""math-verify reads ``2\\binom{5}{2}`` as a mixed number."""
_EXPONENT = re.compile(r"(?<![\w.])([0-9]+\.[0-9]+[eE][-+]?[0-9]+|[0-9]+[eE](?:[-+]0[0-9]|\+[0-9]{2}))(?![\w.])")
"""A number as programs print it. ``2e-3`` is none, since e is a number, too."""
_REPEATING = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]{0,12})\\overline\s*\{\s*([0-9]{1,12})\s*\}")
_RATE = re.compile(r"\\frac\s*\{\s*(\\text\{[^{}]*\})\s*\}\s*\{\s*(\\text\{[^{}]*\})\s*\}$")
_WORDS = re.compile(r"\\(?:text(?:it|rm|bf|sf|tt|normal)?|mbox|mathrm|mathit|mathsf|operatorname|emph)\s*\{([^{}]*)\}")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]|\S", re.DOTALL)
_END = re.compile(r"(?<![.])[.,;]\s*$")
"""Punctuation behind an answer, but no ``0.333...``."""
_CIRCLE_OR_DEGREES = re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\bdegrees?|\\text\{\s*degrees?\s*\})\s*$")
_THOUSANDS = re.compile(r"(?:\\?\$)?\s*[-+]?[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+(?:\.[0-9]+)?")
_LETTER = re.compile(r"[A-Za-z]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi "
    "varphi chi psi omega Delta Theta Lambda Sigma Phi Psi Omega ell"
)
_NAME = re.compile(
    r"(?:m\s*)?\\angle\s*[A-Z]{1,3}|\\?\|\s*[A-Za-z]\s*\\?\||\|?\s*(?:\\overline\s*\{\s*)?[A-Z]{2}\s*\}?\s*\|?|\\text\{[^{}=]*\}|[A-Za-z]{4,}|"
    rf"(?:[A-Za-z]|\\(?:{'|'.join(_GREEK.split())})(?![A-Za-z]))(?:_(?:\w|\{{\w+\}}))?'{{0,3}}"
    r"(?:\s*\([^()=]{1,30}\))?"
)
"""Of an unknown, a function, an angle or a segment."""
_NAMED = re.compile(rf"\s*(?:{_NAME.pattern})\s*(?:=|\\in(?![A-Za-z]))\s*")
MAX_PLACES = 400
"""Of a number that is printed with an exponent; one with more is left as it is."""
MAX_ITEMS = 64
"""Of a list. A longer one must be the same text."""

_ALIASES = (
    *("cm centimeter centimeters centimetre centimetres", "m meter meters metre metres", "ft foot feet"),
    *("km kilometer kilometers kilometre kilometres", "mm millimeter millimeters", "in inch inches", "mi mile miles"),
    *("s sec secs second seconds", "min mins minute minutes", "h hr hrs hour hours", "g gram grams"),
    *(
        "kg kilogram kilograms",
        "l L liter liters litre litres",
        "ml mL milliliter milliliters",
        "mg milligram milligrams",
    ),
    *("deg degree degrees", "unit units", "yd yard yards", "lb lbs pound pounds", "oz ounce ounces", "ton tons"),
    *("day days", "week weeks", "month months", "year years yr yrs", "dollar dollars usd USD", "cent cents"),
    *("euro euros EUR", "yen JPY", "people person persons", "way ways", "time times", "point points"),
    *(
        "student students",
        "rad radian radians",
        "percent",
        "degC Celsius celsius",
        "degF Fahrenheit fahrenheit",
        "kelvin K kelvins",
    ),
    *("米", "厘米", "千米", "公里", "元", "个", "人", "度", "克", "千克", "小时", "分钟", "秒", "天", "岁", "种"),
)
_UNIT_OF = {name: names.split()[0] for names in _ALIASES for name in names.split()}
_RATES = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "fps": "ft/s"}
_CURRENCY = re.compile(r"^([-+]?)\s*(\\?\$|\u00a3|\\pounds(?![A-Za-z])|\u20ac|\u00a5)\s*(?=[-+0-9.\\(])")
_SIGN_BEHIND = re.compile(r"(?<=[0-9}])\s*(\\?\$|\u00a3|\u20ac|\u00a5|\u00a2|''?|\")$")
"""Also of feet and inches."""
_UNIT_SIGNS = {"$": "dollar", "\u00a3": "sterling", "\\pounds": "sterling", "\u20ac": "euro", "\u00a5": "yen"}
_UNIT_SIGNS |= {"\u00a2": "cent", "'": "ft", "''": "in", '"': "in"}
_PERCENT_BEHIND = re.compile(r"\s*\\?%\s*$")
_HALF_DAY = re.compile(
    r"^([0-9]{1,2}(?::[0-9]{2}){0,2})\s*(?:\\text\{\s*)?(?:o'clock\s*)?([aApP])\.?\s*[mM]\.?(?:\s*\})?$"
)
"""A time before or after noon."""
_TEMPERATURE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\text\{\s*\^\\circ)\s*(?:\\text\{)?\s*([CF])\s*\}?\s*$")
_POWER = r"(?:\s*\^\s*\{?\s*-?[0-9]\s*\}?)?"
_UNIT_AT_END = re.compile(
    rf"(?<=[0-9}}\)\]A-Za-z])\s*((?:\\text\{{[^\d{{}}]+\}}{_POWER}\s*/?\s*){{1,3}})$|"
    rf"(?:(?<=[0-9}}\)])|(?<=\\pi)(?=\s))\s*([A-Za-z]+{_POWER}(?:(?:\s+|\s*/\s*)[A-Za-z]+{_POWER}){{0,4}}|[\u4e00-\u9fff]{{1,2}})$"
)
_SUM = re.compile(r"\S\s*[-+]")
_ONE_LETTER = re.compile(rf"[A-Za-z]{_POWER}")
_UNIT_WORD = re.compile(r"[^\W\d_]+|/|\^\s*\{?\s*(-?[0-9])\s*\}?")
_BEFORE_A_UNIT = re.compile(r"[0-9}]\s*$|\\pi\s*$")
_OF_A_POWER = re.compile(r"[A-Za-z}]\s*[\^_]\s*\{?[0-9]+\}?\s*$")
_SCALE = re.compile(r"(?:[0-9.})]|\\pi)\s*\\text\{\s*([kKMB]|bn|bln|mn|mln|mio|mrd|tn|trn)(?![A-Za-z])")
"""Letters that may stand for a thousand, a million or a billion."""
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
MAX_UNIT_WORDS = 5
_OTHER_WORDS = (
    "or and not to no if for where when than more less least most at over under mod modulo base plus minus times "
    "twice negative i e x y z n k a b c pi infinity undefined none any all is are but except odd even"
)
_SQUARED_UNIT = re.compile(r"(?<=[A-Za-z]\s)\s*(?:squared|cubed)\s*$")
_NO_UNIT = frozenset(_OTHER_WORDS.split())
"""Words that change the meaning of the number before them."""
_PARTS = (
    r"hal(?:f|ves)|thirds?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|elevenths?|twelfths?|"
    r"[a-z]*(?:teenth|tieth|dredth|sandth|llionth)s?|rds|ths|"
)
_DIGITS = "zero|one|two|three|four|five|six|seven|eight|nine"
MODIFIER = re.compile(
    rf"(?<![\\A-Za-z])(?:{_PARTS}hundreds?|thousands?|[a-z]{{1,6}}llions?|dozens?|gross|score|lakhs?|crores?|mil|"
    r"under|over|(?:below|above)\s+zero|minus|negative|not|non|base|binary|ternary|octal|hex|hexadecimal|except|wrong|"
    r"incorrect|at\s+(?:least|most)|or\s+(?:more|less|fewer)|(?:more|less|fewer)\s+than|plus|twice|thrice|"
    r"factorials?|squared|cubed|doubled|tripled|halved|inverse|reciprocal|recurring|repeating|"
    rf"(?:sq\w*\s+|cube\s+)?root|cube\s+roots|choose|point\s+(?:{_DIGITS})|folds?)(?![A-Za-z])",
    re.IGNORECASE,
)
"""Words that change the number before them."""

Kind = Literal["value", "list", "tuple", "set", "union"]


@dataclass(frozen=True)
class MathForm:
    """What an answer is made of. `items` of a value is its text alone."""

    kind: Kind
    items: tuple[str, ...]
    brackets: str = ""
    """Of a tuple or an interval: ``(]``, say."""


def spell(text: str) -> str:
    """The answer as LaTeX in one of the ways to write it: no markup around it or within words, no spacing."""
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2] or found[3]}}}", text).translate(_TABLE).strip()
    text = _BARE_BINOMIAL.sub(r"\\binom{\1}{\2}", _CHOOSE.sub(r"\\binom{\1}{\2}", text.rstrip("\\")))
    text = _unwrapped(text)
    text = _SIZED_FRACTION.sub(lambda _: r"\frac", text)
    for name, same in _SAME:
        text = re.sub(re.escape(name) + r"(?![A-Za-z])", same.replace("\\", r"\\"), text)
    text = _FONT.sub("", _SPACING.sub(" ", _APART.sub("", text)))
    text = _WORDS.sub(lambda found: rf"\text{{{' '.join(found[1].split())}}}", text)
    text = _RATE.sub(r"\1/\2", _SIGNS.sub(lambda found: found[1] or found[2] or " ", text))
    text = _FACTOR.sub(r"\\cdot ", text)
    text = _EXPONENT.sub(_in_decimals, _REPEATING.sub(_as_fraction, text))
    text = _unwrapped(_END.sub("", text).strip())
    return text.replace(" ", "") if _APART_BY_BLANKS.fullmatch(text) else text


def _as_fraction(found: re.Match[str]) -> str:
    """``0.1\\overline{6}`` as a fraction."""
    whole, fixed, period = found[1] or "0", found[2], found[3]
    numerator = int(whole + fixed + period) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def _in_decimals(found: re.Match[str]) -> str:
    number = Decimal(found[1])
    return f"{number:f}" if abs(number.adjusted()) < MAX_PLACES else found[1]


def words(text: str) -> str:
    r"""Its words alone, without ``\text`` around some of them."""
    return " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).casefold().split())


def _unwrapped(text: str) -> str:
    for opening, closing in _WRAPPED:
        inner = text[len(opening) : -len(closing)]
        wrapped = text == f"{opening}{inner}{closing}"
        if wrapped and inner and opening not in inner and closing not in inner:
            return inner.strip()
    if text[:1] == "{" and text[-1:] == "}" and _is_one_group(text, 1):
        return text[1:-1].strip()
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


def form(text: str) -> MathForm:
    """The form of an answer as `spell` writes it."""
    text = text.strip()
    pieces = _split(text, r"\cup")
    if len(pieces) > 1:
        return MathForm("union", tuple(pieces))
    if text.startswith(r"\{") and text.endswith(r"\}") and _is_one_group(text, 2):
        return MathForm("set", tuple(_items(text[2:-2])))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _is_one_group(text, 1):
        inner = _split(text[1:-1], ",")
        if len(inner) > 1:
            return MathForm("tuple", tuple(inner), text[0] + text[-1])
    items = _items(text)
    return MathForm("list", tuple(items)) if len(items) > 1 else MathForm("value", tuple(items) or (text,))


def _items(text: str) -> list[str]:
    r"""The values of a list: ``1, 2``, ``1 or 2`` and ``\pm 1``. A number with commas at its thousands is one."""
    if _THOUSANDS.fullmatch(without_unit(text.strip())[0]):
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
    r"""An item without the unknown that it is the value of: ``x = 2``, ``x \in [1, 2]``, ``\theta = 90``."""
    found = _NAMED.match(item)
    return item[found.end() :] if found else item


def is_relation(item: str) -> bool:
    """Whether it is an equation of which no side is the value of the other's name: ``x + y = 6``, and not ``x = 6``."""
    if re.search(r"\|\s*[a-z]\s*\|\s*=", item):  # of which there are two
        return True
    if item.count("=") != 1 or re.search(r"[<>!]|\\(?:ne|le|ge|lt|gt)(?![a-z])", item):
        return False
    sides = [side.strip() for side in item.split("=")]
    return not any(_NAME.fullmatch(side) or not _LETTER.search(_COMMAND.sub("", side)) for side in sides[:1]) and not (
        _NAME.fullmatch(sides[1])
    )


def without_unit(item: str) -> tuple[str, str]:
    """A number without the unit beside it, and that unit in one of its spellings."""
    sign = _CURRENCY.match(item)
    if sign:
        return sign[1] + _without_unit_behind(item[sign.end() :])[0], _UNIT_SIGNS[
            sign[2].lstrip("\\") if "$" in sign[2] else sign[2]
        ]
    return _without_unit_behind(item)


def _without_unit_behind(item: str) -> tuple[str, str]:
    for pattern, unit in ((_TEMPERATURE, "deg"), (_CIRCLE_OR_DEGREES, "deg"), (_PERCENT_BEHIND, "percent")):
        found = pattern.search(item)
        if found and item[: found.start()].strip():
            return item[: found.start()].strip(), unit + (found[1] if pattern is _TEMPERATURE else "")
    if found := _SIGN_BEHIND.search(item):
        return item[: found.start()].strip(), _UNIT_SIGNS[found[1].lstrip("\\")]
    if found := _HALF_DAY.match(item):
        return found[1], f"{found[2].lower()}m"
    found = _UNIT_AT_END.search(item)
    if found is None or not _BEFORE_A_UNIT.search(item[: found.start()]):
        return item, ""
    if found[1] is None and _ONE_LETTER.fullmatch(found[2]) and _SUM.search(item[: found.start()]):
        return item, ""  # 3+2h^2
    if found[1] is None and _OF_A_POWER.search(item[: found.start()]):
        return item, ""  # v^2m
    name = _unit_of(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", found[1] or found[2]), found[1] is None)
    return (item, "") if name is None else (item[: found.start()].strip(), name)


def _unit_of(text: str, must_be_known: bool) -> str | None:
    """A unit in one spelling: ``cm^2``, ``mi/h``; None if the words are none. Two letters of a variable and its power
    are a unit only if they are known as one."""
    if MODIFIER.search(_SQUARED_UNIT.sub("", text)):
        return None
    parts: list[str] = []
    power = 1
    found = list(_UNIT_WORD.finditer(text.replace(".", "")))
    if (
        not found
        or len(found) > MAX_UNIT_WORDS
        or re.sub(r"\s", "", _UNIT_WORD.sub("", text.replace(".", ""))) not in ("", "-")
    ):
        return None
    for match in found:
        word = match.group()
        lower = word.lower()
        if match[1] is not None or (lower in _POWERS and lower[-1] == "d" and parts):
            if not parts or parts[-1] == "/":
                return None
            parts[-1] += f"^{match[1] or _POWERS[lower]}"
        elif lower in _POWERS and lower[-1] != "d":
            power = _POWERS[lower]
        elif word == "/" or lower == "per":
            parts.append("/")
        else:
            name = _UNIT_OF.get(word) or _UNIT_OF.get(lower if len(word) > 1 else "") or _RATES.get(lower)
            if (name is None and (must_be_known or (word if len(word) == 1 else lower) in _NO_UNIT)) or (
                must_be_known and word == "K"
            ):
                return None  # 5K may be 5,000
            name = name or (lower[:-1] if lower.endswith("s") else lower)
            parts.append(name if power == 1 else f"{name}^{power}")
            power = 1
    text = " ".join(parts).replace(" / ", "/")
    return text.removeprefix("deg ") if text in ("deg degC", "deg degF") else text.strip("/") or None


def scale(item: str) -> str:
    """The letters beside a number that may stand for a thousand and more: ``5 \\text{K}``."""
    found = _SCALE.search(item)
    return found[1] if found else ""


def same_unit(one: str, other: str) -> bool:
    """Whether two units may be the same; a degree is one of any temperature."""
    return one == other or ("deg" in (one, other) and one.startswith("deg") and other.startswith("deg"))
