"""Whether a text has an output that a ground truth names, which is a number or another text."""

from __future__ import annotations

import re
from decimal import Decimal

_CURRENCIES = {"$": "usd", "€": "eur", "£": "gbp", "¥": "jpy"}
"""Symbols and what they stand for. ``10USD`` and ``$10`` are equal."""
_CODES = "usd|eur|gbp|jpy|chf|cny|inr|cad|aud"
_SYMBOLS = "".join(map(re.escape, _CURRENCIES))
_UNITS = f"[%{_SYMBOLS}]|{_CODES}|mg|kg|g|mm|cm|km|mi|ft|lbs?|oz|ml|l|ms|min|hrs?|h|kb|mb|gb|tb"
"""Those that a number may have. No k, m and b, which multiply, and no words."""
_NUMBER = re.compile(
    rf"""
    (?<!\w)(?<![0-9][.,])  # not in a word, a date, a version or another number
    (?P<minus>(?<!-)[-−])?
    (?:(?P<before>[{_SYMBOLS}]|{_CODES})[ ]?)?
    (?P<minus_behind>[-−])?
    (?P<digits>(?:[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})+|0|[1-9][0-9]*)(?:\.[0-9]+)?|\.[0-9]+)
    (?:[ ]?(?P<behind>{_UNITS})(?!\w)|(?!\w))
    (?![.,][0-9])
    """,
    re.VERBOSE,
)


def contains_output(text: str, output: str) -> bool:
    """Return whether `text` has `output`, not as a part of a longer word or number. Letter case does not matter.

    Numbers are compared by value: ``1,234.00`` is ``1234``, ``-5`` is not ``5``. A number's unit or currency must be
    the same if `output` has one. A number with a leading zero, such as ``007``, is a text. Commas in texts do not
    matter.
    """
    text, output = text.lower(), output.strip().lower()
    number = _NUMBER.fullmatch(output)
    if number is None:
        pattern = rf"(?<!\w)(?<!\d\.){re.escape(output.replace(',', ''))}(?!\w)(?!\.\d)"
        return re.search(pattern, text.replace(",", "")) is not None
    value, unit = _read(number)
    found = map(_read, _NUMBER.finditer(text))
    return any(each == value and unit in ("", its_unit) for each, its_unit in found)


def _read(number: re.Match[str]) -> tuple[Decimal, str]:
    """Return value and unit of a match of `_NUMBER`."""
    value = Decimal(number["digits"].replace(",", ""))
    unit = number["before"] or number["behind"] or ""
    return -value if number["minus"] or number["minus_behind"] else value, _CURRENCIES.get(unit, unit)
