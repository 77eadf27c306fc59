from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.servers.tools.actions import results, text
from verl_tool.servers.tools import tool_class
from verl_tool.servers.tools._arithmetic import CONSTANTS, FUNCTIONS, ExpressionError, as_text, evaluate

CALCULATOR = tool_class("calculator")


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("13.1-3", "10.1"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.333333333333333"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("10 - 4 - 3", "3"),
        ("2 ** 3 ** 2", "512"),
        ("2 ^ 10", "1024"),
        ("-2 ** 2", "-4"),
        ("2 ** -1", "0.5"),
        ("--3", "3"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7 % -3", "-2"),
        ("5.5 % 2", "1.5"),
        ("sqrt(16)", "4"),
        ("round(2.675, 2)", "2.68"),
        ("round(2.5)", "2"),
        ("round(1234, -2)", "1200"),
        ("max(1, 2.5, -3) + min(4, 2)", "4.5"),
        ("abs(-3)", "3"),
        ("floor(-1.5) + ceil(1.2)", "0"),
        ("log(100, 10)", "2"),
        ("log(8, 2)", "3"),
        ("ln(e)", "1"),
        ("sin(pi)", "0"),
        ("cos(0)", "1"),
        ("factorial(20)", "2432902008176640000"),
        ("2**100", "1267650600228229401496703205376"),
        ("1e3", "1000"),
        (".5 + 1.", "1.5"),
        ("1e-9", "1E-9"),
        ("3 × 4 ÷ 2 − 1", "5"),
        ("13.1-3 =", "10.1"),
        ("0 ** 0", "1"),
        ("-0.0", "0"),
    ],
)
def test_calculates(expression: str, answer: str) -> None:
    assert as_text(evaluate(expression)) == answer


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("5 // 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("", "empty"),
        ("1 +", "ends too early"),
        ("(2", "ends too early"),
        ("1 1", "cannot read it from character 3"),
        ("1,000 + 1", "write 1000, not 1,000"),
        ("__import__('os')", "cannot read it from character 1"),
        ("foo + 1", "'foo' is unknown; constants: pi, tau, e"),
        ("foo(1)", "function 'foo' is unknown; known: abs,"),
        ("sqrt()", "sqrt takes 1 arguments, not 0"),
        ("round(1, 2, 3)", "round takes 1 to 2 arguments, not 3"),
        ("sqrt(-1)", "sqrt(-1) has no value"),
        ("ln(0)", "ln(0) has no value"),
        ("asin(2)", "asin(2) has no value"),
        ("log(8, 1)", "log(8, 1) has no value"),
        ("(-8) ** 0.5", "is not a real number"),
        ("9 ** 9 ** 9", "larger than 1E+9999"),
        ("1e9999 * 10", "larger than 1E+9999"),
        ("factorial(99999)", "factorial takes a whole number from 0 to 3000"),
        ("factorial(1.5)", "factorial takes a whole number"),
        ("exp(99999)", "exp(99999) has no value"),
        ("round(1, 0.5)", "round takes a whole number of digits"),
        ("5 // 1e-100", "no value that is a real number of this size"),
    ],
)
def test_says_what_is_wrong(expression: str, words: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        evaluate(expression)
    assert words in str(caught.value)


numbers = st.decimals(min_value=-1000, max_value=1000, places=3)


@given(numbers, numbers)
def test_agrees_with_decimal(a: Decimal, b: Decimal) -> None:
    assert evaluate(f"({a}) + ({b})") == a + b
    assert evaluate(f"({a}) - ({b})") == a - b
    assert evaluate(f"({a}) * ({b})") == a * b


@given(st.integers(-1000, 1000), st.integers(-1000, 1000).filter(bool))
def test_division_and_remainder_are_pythons(a: int, b: int) -> None:
    assert evaluate(f"({a}) // ({b})") == a // b
    assert evaluate(f"({a}) % ({b})") == a % b


@pytest.mark.parametrize("name", ["sin", "cos", "tan", "atan", "exp", "sqrt", "ln", "log10", "log2"])
@given(x=st.floats(0.01, 20))
@settings(max_examples=20)
def test_functions_agree_with_the_math_module(name: str, x: float) -> None:
    expected = {"ln": math.log}.get(name) or getattr(math, name)
    assert float(evaluate(f"{name}({x:.10f})")) == pytest.approx(expected(float(f"{x:.10f}")), rel=1e-9, abs=1e-9)


def outcome(expression: str) -> str:
    """The value as text, or the words of the error."""
    try:
        return as_text(evaluate(expression))
    except ExpressionError as error:
        return str(error)


TOKENS = [
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "**",
    "^",
    "(",
    ")",
    ",",
    "1",
    "9e9999",
    "1e-9999",
    "0",
    ".",
    " ",
    "é",
    "\ud800",
]


@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from([*TOKENS, *FUNCTIONS, *CONSTANTS])).map("".join)))
def test_any_text_has_a_value_or_an_error(text: str) -> None:
    assert outcome(text[:1000])


@pytest.mark.parametrize("expression", ["**".join(["9e9"] * 200), "(" * 1000, "-" * 999 + "1", "1.5**.3+" * 124 + "1"])
def test_the_worst_expressions_end_at_once(expression: str) -> None:
    """One that did not would run into the test's time limit."""
    assert outcome(expression)


@pytest.mark.parametrize("action", CALCULATOR.example_actions)
async def test_every_example_action_is_answered(action: str) -> None:
    assert (await text(CALCULATOR(), action)).strip() == "10.1"


async def test_an_error_is_an_observation() -> None:
    [result] = await results(CALCULATOR(), "<calculator>1/0</calculator>")
    assert (result.text, result.error, result.valid) == ("Error: division by zero", True, True)


async def test_a_long_expression_is_refused_with_the_limit() -> None:
    tool = CALCULATOR(max_expression_chars=10)
    assert await text(tool, "<calc>1+1+1+1+1+1</calc>") == (
        "Error: the expression has 11 characters; at most 10 are calculated"
    )


async def test_digits_of_the_answer() -> None:
    assert await text(CALCULATOR(digits=4), "<calculator>2/3</calculator>") == "0.6667"
