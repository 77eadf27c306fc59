"""Decimal arithmetic over expressions such as ``sqrt(2) * (13.1 - 3)``: a grammar and its meaning, no `eval`.

Everything is bounded: 50 significant digits, exponents of ten up to 9999, and by the caller the expression's length. So
an expression of 1000 characters takes some tens of milliseconds at most. ``//``, ``%`` and `round` mean what they mean
in Python; ``^`` is a power too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import (
    ROUND_CEILING,
    ROUND_FLOOR,
    ROUND_HALF_EVEN,
    Context,
    Decimal,
    DecimalException,
    DivisionByZero,
    InvalidOperation,
    Overflow,
    localcontext,
)
from functools import cache
from typing import NoReturn

from lark import Lark, Token, Transformer, UnexpectedInput, UnexpectedToken, v_args

PRECISION = 50
"""Significant digits of every step."""
_CONTEXT = Context(
    prec=PRECISION, Emax=9999, Emin=-9999, rounding=ROUND_HALF_EVEN, traps=[DivisionByZero, InvalidOperation, Overflow]
)
_MAX_FACTORIAL = 3000
_LIKE_ASCII = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "π": "pi", "√": "sqrt"})

_GRAMMAR = r"""
    ?start: sum
    ?sum: product
        | sum "+" product -> add
        | sum "-" product -> subtract
    ?product: unary
        | product "*" unary -> multiply
        | product "/" unary -> divide
        | product "//" unary -> floor_divide
        | product "%" unary -> modulo
    ?unary: power
        | "-" unary -> negate
        | "+" unary
    ?power: atom
        | atom ("**" | "^") unary -> power
    ?atom: NUMBER -> number
        | NAME "(" [sum ("," sum)*] ")" -> function
        | NAME -> constant
        | "(" sum ")"
    NUMBER: /(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,5})?/
    NAME: /[A-Za-z][A-Za-z0-9_]*/
    %ignore /\s+/
"""


class ExpressionError(ValueError):
    """The expression cannot be read, or has no value. The message is for the model."""


def evaluate(expression: str) -> Decimal:
    """The value of an expression, to `PRECISION` significant digits. Raises ExpressionError."""
    text = expression.translate(_LIKE_ASCII).strip().removesuffix("=")
    if not text.strip():
        raise ExpressionError("the expression is empty; write one such as 13.1-3")
    with localcontext(_CONTEXT):
        try:
            return _PARSER.parse(text)  # type: ignore[return-value]  # the transformer makes it a Decimal
        except ExpressionError:
            raise
        except UnexpectedInput as error:
            raise ExpressionError(_where(text, error)) from error
        except Overflow as error:
            raise ExpressionError(f"a number is larger than 1E+{_CONTEXT.Emax}") from error
        except (DecimalException, ValueError, OverflowError) as error:
            raise ExpressionError("an operation has no value that is a real number of this size") from error


def as_text(value: Decimal, digits: int = 15) -> str:
    """As a person would write it: whole numbers in full up to `PRECISION` digits, others to `digits` digits."""
    with localcontext(_CONTEXT):
        if value.adjusted() < PRECISION and value == value.to_integral_value():
            return f"{value.to_integral_value() + 0:f}"
    rounded = Context(prec=digits, Emax=99999, Emin=-99999).plus(value).normalize()
    return f"{rounded:f}" if -7 < rounded.adjusted() < PRECISION else f"{rounded}"


def _where(text: str, error: UnexpectedInput) -> str:
    if isinstance(error, UnexpectedToken) and error.token.type == "$END":
        return "the expression ends too early; a number or ')' is missing"
    place = error.pos_in_stream or 0
    hint = " (write 1000, not 1,000)" if text[place] == "," else ""
    return f"cannot read it from character {place + 1}: {text[place : place + 20]!r}{hint}"


def _no_value(name: str, arguments: Sequence[Decimal]) -> NoReturn:
    listed = ", ".join(as_text(argument) for argument in arguments)
    raise ExpressionError(f"{name}({listed}) has no value that is a real number of this size")


def _floor_divide(a: Decimal, b: Decimal) -> Decimal:
    quotient = a // b
    return quotient - 1 if a % b != 0 and (a < 0) != (b < 0) else quotient


def _power(base: Decimal, exponent: Decimal) -> Decimal:
    if base == 0 and exponent < 0:
        raise ExpressionError("division by zero")
    if base == 0 and exponent == 0:
        return Decimal(1)
    if base < 0 and exponent != exponent.to_integral_value():
        raise ExpressionError(f"{as_text(base)} to the power of {as_text(exponent)} is not a real number")
    return base**exponent


def _round(value: Decimal, digits: Decimal = Decimal(0)) -> Decimal:
    if digits != digits.to_integral_value() or abs(digits) > PRECISION:
        raise ExpressionError(f"round takes a whole number of digits up to {PRECISION}, not {as_text(digits)}")
    if value.adjusted() + int(digits) >= PRECISION:
        return value
    return value.quantize(Decimal(1).scaleb(-int(digits)), ROUND_HALF_EVEN)


def _whole(rounding: str) -> Callable[[Decimal], Decimal]:
    return lambda value: value.to_integral_value(rounding)


def _log(value: Decimal, base: Decimal | None = None) -> Decimal:
    return value.ln() if base is None else value.ln() / base.ln()


def _factorial(value: Decimal) -> Decimal:
    if value != value.to_integral_value() or not 0 <= value <= _MAX_FACTORIAL:
        raise ExpressionError(f"factorial takes a whole number from 0 to {_MAX_FACTORIAL}, not {as_text(value)}")
    return _product_to(int(value))


@cache
def _product_to(number: int) -> Decimal:
    product = Decimal(1)
    for factor in range(2, number + 1):
        product *= factor
    return product


def _by_float(function: Callable[[float], float]) -> Callable[[Decimal], Decimal]:
    """A function of the math module: 15 digits are right. Tiny errors such as sin(pi) = 1.2e-16 are rounded away."""
    return lambda value: round(Decimal(function(float(value))), 15)


Function = Callable[..., Decimal]

FUNCTIONS: dict[str, tuple[Function, int, int]] = {
    "abs": (abs, 1, 1),
    "acos": (_by_float(math.acos), 1, 1),
    "asin": (_by_float(math.asin), 1, 1),
    "atan": (_by_float(math.atan), 1, 1),
    "ceil": (_whole(ROUND_CEILING), 1, 1),
    "cos": (_by_float(math.cos), 1, 1),
    "degrees": (_by_float(math.degrees), 1, 1),
    "exp": (Decimal.exp, 1, 1),
    "factorial": (_factorial, 1, 1),
    "floor": (_whole(ROUND_FLOOR), 1, 1),
    "ln": (Decimal.ln, 1, 1),
    "log": (_log, 1, 2),
    "log10": (Decimal.log10, 1, 1),
    "log2": (lambda value: value.ln() / Decimal(2).ln(), 1, 1),
    "max": (lambda *values: max(values), 1, 100),
    "min": (lambda *values: min(values), 1, 100),
    "pow": (_power, 2, 2),
    "radians": (_by_float(math.radians), 1, 1),
    "round": (_round, 1, 2),
    "sin": (_by_float(math.sin), 1, 1),
    "sqrt": (Decimal.sqrt, 1, 1),
    "tan": (_by_float(math.tan), 1, 1),
}
"""Each function with the least and the greatest number of its arguments. Angles are in radians."""

CONSTANTS = {
    "pi": Decimal("3.1415926535897932384626433832795028841971693993751"),
    "tau": Decimal("6.2831853071795864769252867665590057683943387987502"),
    "e": Decimal("2.7182818284590452353602874713526624977572470937000"),
}


@v_args(inline=True)
class _Evaluator(Transformer[Token, Decimal]):
    """Computes while the parser reads, so that depth costs no recursion."""

    def number(self, token: Token) -> Decimal:
        return +Decimal(token)

    def constant(self, token: Token) -> Decimal:
        if token not in CONSTANTS:
            raise ExpressionError(f"{str(token)!r} is unknown; constants: {', '.join(CONSTANTS)}")
        return CONSTANTS[token]

    def function(self, token: Token, *arguments: Decimal | None) -> Decimal:
        if token not in FUNCTIONS:
            raise ExpressionError(f"function {str(token)!r} is unknown; known: {', '.join(FUNCTIONS)}")
        function, minimum, maximum = FUNCTIONS[token]
        values = [argument for argument in arguments if argument is not None]
        if not minimum <= len(values) <= maximum:
            count = f"{minimum}" if minimum == maximum else f"{minimum} to {maximum}"
            raise ExpressionError(f"{token} takes {count} arguments, not {len(values)}")
        try:
            value = function(*values)
        except ExpressionError:
            raise
        except (DecimalException, ValueError, OverflowError):
            _no_value(str(token), values)
        return value if value.is_finite() else _no_value(str(token), values)

    def add(self, a: Decimal, b: Decimal) -> Decimal:
        return a + b

    def subtract(self, a: Decimal, b: Decimal) -> Decimal:
        return a - b

    def multiply(self, a: Decimal, b: Decimal) -> Decimal:
        return a * b

    def divide(self, a: Decimal, b: Decimal) -> Decimal:
        return a / _divisor(b)

    def floor_divide(self, a: Decimal, b: Decimal) -> Decimal:
        return _floor_divide(a, _divisor(b))

    def modulo(self, a: Decimal, b: Decimal) -> Decimal:
        return a - b * _floor_divide(a, _divisor(b))

    def negate(self, a: Decimal) -> Decimal:
        return -a

    def power(self, a: Decimal, b: Decimal) -> Decimal:
        return _power(a, b)


def _divisor(value: Decimal) -> Decimal:
    if value == 0:
        raise ExpressionError("division by zero")
    return value


_PARSER = Lark(_GRAMMAR, parser="lalr", transformer=_Evaluator(), maybe_placeholders=False)
