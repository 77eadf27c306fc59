"""Compare the output of a program with the expected one. Sent into the sandbox with the judge.

As in LiveCodeBench, white space around lines and between words does not count, nor do blank lines, and numbers are
equal as decimals (``0.2`` and ``0.2000``). Unlike there, and as in verl's `prime_code`, fractions may differ by
rounding.
"""

import re

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.(?P<places>[0-9]*))?|\.(?P<only>[0-9]+))(?P<power>[eE][-+]?[0-9]{1,4})?")
"""ASCII digits, without the ``1_000`` that `Decimal` accepts."""
_INFINITY = re.compile(r"([-+]?)(?:inf|infinity)", re.IGNORECASE)
MAX_NUMBER_CHARS = 4000
"""Longer numbers must be equal as text."""
MIN_PLACES = 6
"""Decimal places that both fractions need to be equal up to the last place of the shorter one."""
RELATIVE, ABSOLUTE = "1e-5", "1e-9"
"""Bounds of a difference in proportion to the number. The first bounds every difference, as `numpy.allclose` does for
`prime_code`. A difference below the second comes from floating-point arithmetic."""
WHOLE_BITS, WHOLE_ABSOLUTE = 50, 1e-6
"""A float near to an integer differs from it in its last bits, or by at most the second value."""


def is_equal_output(text, expected, strict=False):
    """Whether the output is the expected one. With `strict`, only white space at the ends of lines may differ."""
    if strict:
        return _trim_lines(text) == _trim_lines(expected)
    lines, due = _split_words(text), _split_words(expected)
    if lines == due:
        return True
    return len(lines) == len(due) and all(map(_is_equal_line, lines, due))


def _trim_lines(text):
    """Split into lines without trailing white space, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _split_words(text):
    """Return the words of each line that has any."""
    return [words for words in map(str.split, text.split("\n")) if words]


def _is_equal_line(line, expected):
    return line == expected or (len(line) == len(expected) and all(map(_is_equal_word, line, expected)))


def _is_equal_word(word, expected):
    if word == expected:
        return True
    if len(word) > MAX_NUMBER_CHARS or len(expected) > MAX_NUMBER_CHARS:
        return False
    one, other = _NUMBER.fullmatch(word), _NUMBER.fullmatch(expected)
    if one is None or other is None:
        one, other = _INFINITY.fullmatch(word), _INFINITY.fullmatch(expected)
        return one is not None and other is not None and (one[1] == "-") == (other[1] == "-")
    return _is_equal_number(one, other)


def _is_equal_number(one, other):
    """Whether the numbers are equal as decimals, or as fractions in the places that both of them have."""
    from decimal import Context, Decimal

    value, due = Decimal(one.group()), Decimal(other.group())
    if value == due:
        return True
    places = [_count_places(number) for number in (one, other)]
    if places[1] == 0:  # an expected integer has no rounding
        return False
    context = Context(prec=50)
    size = abs(due)
    difference = abs(context.subtract(value, due))
    last_place = Decimal(1).scaleb(-min(places)) if min(places) >= MIN_PLACES else Decimal(0)
    if due == due.to_integral_value():  # not a rounding of the next integer
        if value == value.to_integral_value():
            return False
        bound = last_place
        if is_near_whole(float(value), float(due)):
            return True
    else:
        bound = max(last_place, context.multiply(size, Decimal(ABSOLUTE)))
    return difference <= min(bound, context.multiply(size, Decimal(RELATIVE)))


def is_near_whole(value, expected):
    """Whether a float is the expected integer apart from rounding by floating-point arithmetic."""
    size = abs(expected)
    rounding = max(WHOLE_ABSOLUTE, size * 2.0**-WHOLE_BITS)
    return abs(value - expected) <= min(rounding, max(size, 1e-3) * float(ABSOLUTE))


def _count_places(number):
    """Count the digits after the point. A number with an exponent has as many as a float."""
    if number["power"]:
        return 15
    return len(number["places"] or number["only"] or "")
