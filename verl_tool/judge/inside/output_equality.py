"""Compares what a program printed with what it should print. Sent into the sandbox beside the judge.

As LiveCodeBench does: white space around lines and between words does not count, nor do blank lines, and numbers are
equal as decimals (``0.2`` and ``0.2000``). Unlike it, and like verl's `prime_code`, fractions may differ by rounding.
"""

import re

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.(?P<places>[0-9]*))?|\.(?P<only>[0-9]+))(?P<power>[eE][-+]?[0-9]{1,4})?")
"""Digits of ASCII, without the ``1_000`` that `Decimal` takes."""
_INFINITY = re.compile(r"([-+]?)(?:inf|infinity)", re.IGNORECASE)
LONGEST_NUMBER = 4000
"""Characters. Longer ones must be equal as text."""
MIN_PLACES = 6
"""Decimal places that both fractions need, to be equal up to the last place of the shorter one."""
RELATIVE, ABSOLUTE = "1e-5", "1e-9"
"""The first bounds each difference by the size of the number, as `numpy.allclose` does for `prime_code`; a difference
below the second, in proportion to the number, is one of the machine's arithmetic."""
WHOLE_BITS, WHOLE_ABSOLUTE = 50, 1e-6
"""A float near to a whole one differs from it in its last bits, or by no more than the second."""


def equal_output(text, expected, strict=False):
    """Whether a program's output is the expected one. `strict`: but for white space at the ends of lines, exactly."""
    if strict:
        return _trimmed(text) == _trimmed(expected)
    lines, due = _words(text), _words(expected)
    if lines == due:
        return True
    return len(lines) == len(due) and all(map(_equal_line, lines, due))


def _trimmed(text):
    """Lines without the space at their ends, empty ones at the end left out."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _words(text):
    """The words of each line that has any."""
    return [words for words in map(str.split, text.split("\n")) if words]


def _equal_line(line, wanted):
    return line == wanted or (len(line) == len(wanted) and all(map(_equal_word, line, wanted)))


def _equal_word(word, wanted):
    if word == wanted:
        return True
    if len(word) > LONGEST_NUMBER or len(wanted) > LONGEST_NUMBER:
        return False
    one, other = _NUMBER.fullmatch(word), _NUMBER.fullmatch(wanted)
    if one is None or other is None:
        one, other = _INFINITY.fullmatch(word), _INFINITY.fullmatch(wanted)
        return one is not None and other is not None and (one[1] == "-") == (other[1] == "-")
    return _equal_number(one, other)


def _equal_number(one, other):
    """Equal as decimals, or two fractions that are one number in the places that both of them show."""
    from decimal import Context, Decimal

    value, due = Decimal(one.group()), Decimal(other.group())
    if value == due:
        return True
    places = [_places(number) for number in (one, other)]
    if places[1] == 0:  # a whole number is expected: it has no rounding
        return False
    context = Context(prec=50)
    size = abs(due)
    difference = abs(context.subtract(value, due))
    last_place = Decimal(1).scaleb(-min(places)) if min(places) >= MIN_PLACES else Decimal(0)
    if due == due.to_integral_value():  # the next whole numbers are no roundings of it
        if value == value.to_integral_value():
            return False
        bound = last_place
        if near_whole(float(value), float(due)):
            return True
    else:
        bound = max(last_place, context.multiply(size, Decimal(ABSOLUTE)))
    return difference <= min(bound, context.multiply(size, Decimal(RELATIVE)))


def near_whole(value, wanted):
    """Whether a float is a whole one but for the rounding of the machine's arithmetic."""
    size = abs(wanted)
    rounding = max(WHOLE_ABSOLUTE, size * 2.0**-WHOLE_BITS)
    return abs(value - wanted) <= min(rounding, max(size, 1e-3) * float(ABSOLUTE))


def _places(number):
    """Digits behind the point; of a number with a power of ten, as many as a float has."""
    if number["power"]:
        return 15
    return len(number["places"] or number["only"] or "")
