"""Whether a text has a number or words of a ground truth."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.environments.simulated_user.output_match import contains_output

numbers = st.decimals(min_value=-(10**9), max_value=10**9, allow_nan=False, allow_infinity=False, places=2)


@st.composite
def written(draw: st.DrawFn, value: Decimal) -> str:
    """Write a number in one of the ways that people do."""
    plain = f"{abs(value):f}".rstrip("0").rstrip(".")
    digits = draw(st.sampled_from([plain, f"{abs(value):.2f}", f"{abs(value):,.2f}", f"{abs(value):.3f}"]))
    sign = "-" if value < 0 else ""
    before, behind = draw(st.sampled_from([("", ""), ("$", ""), ("£", ""), ("", "GBP"), ("", " kg"), ("", "%")]))
    return draw(st.sampled_from([f"{sign}{before}{digits}{behind}", f"{before}{sign}{digits}{behind}"]))


@given(st.data(), numbers, numbers)
def test_numbers_are_equal_exactly_if_their_values_are(data: st.DataObject, value: Decimal, truth: Decimal) -> None:
    frame = data.draw(st.sampled_from(["{}", "It is {}.", "({}), sir", "**{}**", "total:{}\n"]))
    text = frame.format(data.draw(written(value)))
    assert contains_output(text, f"{value:f}")
    assert contains_output(text, f"{truth:f}") is (value == truth)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("$10.00", "10"),
        ("It is 1,234.00 pounds.", "1234"),
        ("30.5", "30.50"),
        ("30GBP", "30"),
        ("USD 10, please", "$10"),
        ("−5 degrees", "-5"),
        ("3-5 days", "5"),
        ("between 3 and 5.", "5"),
        (".5", "0.50"),
        ("Order HAT213, today", "hat213"),
        ("agent 007", "007"),
        ("Yes, Sir", "yes sir"),
        ("24 pounds", "24 pounds"),
    ],
)
def test_what_is_there_is_found(text: str, output: str) -> None:
    assert contains_output(text, output)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("-5", "5"),
        ("$-5 or -$5", "5"),
        ("5", "-5"),
        ("240, 1.24, 24.5 or 1,024", "24"),
        ("24,36", "24"),
        ("24,36", "36"),
        ("1,234x", "1"),
        ("1.2.3", "2"),
        ("seat 12A", "12"),
        ("v2 and HAT213", "213"),
        ("30k", "30"),
        ("the 24th", "24"),
        ("agent 007", "7"),
        ("€10", "$10"),
        ("10 items", "10%"),
        ("yesterday", "yes"),
    ],
)
def test_what_is_a_part_of_something_else_is_not_found(text: str, output: str) -> None:
    assert not contains_output(text, output)
