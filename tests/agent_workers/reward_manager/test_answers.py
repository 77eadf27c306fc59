"""Finding the final answer."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.agent_workers.reward_manager.answers import (
    as_number,
    last_boxed,
    last_code_block,
    last_number,
    last_tagged,
)

PIECES = st.lists(
    st.sampled_from(["```", "python", "\n", "x = 1", " ", "\\boxed{", "}", "{", "\\", "<answer>", "</answer>"])
)


@pytest.mark.parametrize(
    ("turns", "code"),
    [
        (["```python\na\n```"], "a\n"),
        (["```python\na\n```\n```python\nb\n```\nDone."], "b\n"),
        (["```python\na\n```\n```output", "So it is.\n```py\nb\n```"], "b\n"),
        (["```python\na\n```\n```output", "No more code."], "a\n"),
        (["```\na\n```"], "a\n"),
        (["```bash\nls\n```\n```python\na\n```\n```text\nb\n```"], "a\n"),
        (["```python\nnever closed"], None),
        (["no code at all"], None),
        ([], None),
        (["  ```python\n  a\n  ```"], "  a\n"),
    ],
)
def test_last_code_block(turns: list[str], code: str | None) -> None:
    assert last_code_block(turns) == code


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"\boxed{", None),
        ("nothing", None),
    ],
)
def test_last_boxed(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


def test_last_tagged() -> None:
    assert last_tagged("<answer>a</answer> <answer> b </answer>", "answer") == "b"
    assert last_tagged("<answer>a</answer> <answer>b", "answer") == "a"
    assert last_tagged("</answer> <answer>", "answer") is None


def test_numbers() -> None:
    assert last_number("first 3, then $1,234.50 it is.") == Decimal("1234.50")
    assert last_number("none") is None
    assert as_number("-5%") == -5
    assert as_number("1e5") == 100000
    assert as_number("inf") is None
    assert as_number("NaN") is None
    assert as_number("") is None


@given(PIECES)
def test_any_text_is_read(pieces: list[str]) -> None:
    text = "".join(pieces)
    for answer in (last_boxed(text), last_tagged(text, "answer"), last_code_block([text])):
        assert answer is None or answer.strip() in text


@given(st.text(alphabet="ab{}\\ \n", max_size=20).filter(lambda t: "{" not in t and "}" not in t and "\\" not in t))
def test_a_boxed_answer_is_found_behind_anything(answer: str) -> None:
    assert last_boxed(f"\\boxed{{junk}} {{ \\boxed{{{answer}}} }}") == answer.strip()


def test_long_texts_take_linear_time() -> None:
    """Each of these takes hours if it is read once a beginning."""
    n = 100_000
    assert last_code_block(["```python\n" * n]) is not None
    assert last_code_block(["```python " * n]) is None
    assert last_number("1," * n) is not None
    assert last_tagged("<answer>" * n, "answer") is None
