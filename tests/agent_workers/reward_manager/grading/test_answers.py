"""Finding the final answer."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from verl_tool.agent_workers.reward_manager.grading.answers import (
    as_number,
    last_boxed,
    last_boxes,
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
        (["```python\ncut"], "cut\n"),
        (["```python\na\n```", "```\nnever closed, without a label"], "a\n"),
        (["no code at all"], None),
        ([], None),
        (["1. It is:\n  ```python\n  for i in a:\n      b\n  ```"], "for i in a:\n    b\n"),
        (["```python\r\na\r\nb\r\n```\r\n"], "a\nb\n"),
        (["Code: ```python\na\n```"], "a\n"),
        (["**Answer**```py\na\n```"], "a\n"),
        (["```python\na\nb```\nDone."], "a\nb\n"),
        (["```python\na\n``` This is it."], "a\n"),
        (["```python print(1)```"], "print(1)\n"),
        (["```python\na\n```\nSave it, then run ```python main.py```"], "a\n"),
        (["```python\na\n```\nRun ```py -m main --n=(3)``` to see it."], "a\n"),
        (["It is ```python print(1)``` and no more."], "print(1)\n"),
        (["```python def f(x):\n    return x\n```"], "def f(x):\n    return x\n"),
        (["```python import sys\nprint(1)\n```"], "import sys\nprint(1)\n"),
        (["```python n = 5\nprint(n)\n```"], "n = 5\nprint(n)\n"),
        (["```def f(x):\n    return x\n```"], "def f(x):\n    return x\n"),
        (["```python main.py\na\n```"], "a\n"),
        (["```python for the first part\na\n```"], "a\n"),
        (["```python showLineNumbers {1,3}\na\n```"], "a\n"),
        (
            ["```\ndef f(n):\n    return n\n```\nThe calls:\n```\nf(3)\nf(2)\nx = f(1)\n```"],
            "def f(n):\n    return n\n",
        ),
        (
            ["```\nx = int(input())\n```\n```\nTraceback (most recent call last):\n    print(x)\n```"],
            "x = int(input())\n",
        ),
        (["```\ndef f(n):\n    return n\n```\n```\n>>> print(f(1))\n1\n```"], "def f(n):\n    return n\n"),
        (["```\nf(1)\n```"], "f(1)\n"),
        (["```py3 def f(x): return x```"], "def f(x): return x\n"),
        (["```python\na\n```\n```python\n>>> f(1)\n1\n```"], "a\n"),
        (["```\ndef f(n):\n    #\n    >>> f(1)\n```\n```\nf(1)\n```"], "def f(n):\n    #\n    >>> f(1)\n"),
        (["```\ndef f(): pass\n```\nSimpler:\n```\nprint(7)\n```"], "print(7)\n"),
        (["```python\na\n```\nIt prints:\n```\n1 2\n```"], "a\n"),
        (["```python\na\n```\nUse it so:\n```\nprint(f(1))\n```"], "a\n"),
        (["```\nprint(1)\n```\nIt prints:\n```\n1\n```"], "print(1)\n"),
        (["```python\na\n```", "It prints:\n```\n1\n```"], "a\n"),
        (["```python\na\n```", "The program:\n```\nimport b\n```"], "import b\n"),
        (["```python\nforgotten\n```python\na\n```"], "a\n"),
        (['```python title="a.py"\na\n```'], "a\n"),
        (["```Python3\na\n```"], "a\n"),
        (['````python\ns = """\n```\n"""\n````'], 's = """\n```\n"""\n'),
        (['```python\nprint("```")\nb\n```'], 'print("```")\nb\n'),
        (['```python\n"""\n    ```f(1)```\n"""\na\n```'], '"""\n    ```f(1)```\n"""\na\n'),
        (["Write ``` around it.\n```python\na\n```"], "a\n"),
        (["```cpp\na\n```"], None),
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
        (r"\boxed {5} or \fbox{5}", "5"),
        (r"\boxed{7} or \boxed{8}", "7, 8"),
        (r"$\boxed{7}$, $\boxed{8}$ and \(\boxed{9}\)", "7, 8, 9"),
        (r"$x = \boxed{1}$ or $x = \boxed{2}$", "1, 2"),
        (r"a = \boxed{3}, b = \boxed{8}", "8"),
        (r"\boxed{7}. So it is \boxed{8}", "8"),
        (r"\boxed{7}\,\boxed{8}", "7, 8"),
        (r"\boxed{7}. \boxed{8}", "7, 8"),
        ("\\boxed{8}\n\n\\boxed{8}", "8"),
    ],
)
def test_last_boxed(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"\boxed{1} and \boxed{2}", ["1", "2"]),
        (r"$\boxed{1}$, $\boxed{\frac{1}{2}}$.", ["1", r"\frac{1}{2}"]),
        (r"First \boxed{1}. Then \boxed{2}", ["2"]),
        (r"\boxed{a \boxed{b}}", ["b"]),
        ("nothing", []),
        (r"\boxed{1} or " * 17, []),
    ],
)
def test_last_boxes(text: str, boxes: list[str]) -> None:
    assert last_boxes(text) == boxes


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


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", "72"),
        ("1,234", "1234"),
        ("1,234,567.5", "1234567.5"),
        ("1{,}234", "1234"),
        ("-5", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        (r"\$5", "5"),
        ("$5$", "5"),
        (r"50\%", "50"),
        (r"\text{72}", "72"),
        ("+7", "7"),
        ("7.", "7"),
        (".5", "0.5"),
        ("7e1", "70"),
        ("\u22127", "-7"),
    ],
)
def test_what_is_a_number(text: str, number: str) -> None:
    assert as_number(text) == Decimal(number)


@pytest.mark.parametrize(
    "text",
    [
        "7,2",
        "7_2",
        "1,23",
        "12,34,567",
        "1,2345",
        "0x48",
        "7 2",
        "7;2",
        "7/1",
        "7 or 8",
        "--7",
        "7-",
        "1e9999",
        "\u0667",
        "\uff17",
        "\u00b2",
        "seven",
        ".",
        ",",
        "$",
        "%",
        "$$",
        "9e",
        "e9",
        "sNaN",
        "Infinity",
    ],
)
def test_what_is_no_number(text: str) -> None:
    assert as_number(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [("it is .5", "0.5"), ("so x=72!", "72"), ("**72**", "72"), ("(-5).", "-5"), ("5, 6", "6"), ("50%.", "50")],
)
def test_the_last_number(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["7_2", "3-4", "v2", "72apples", "7,2", "1.2.3", "7 \u0668", "5 x\u00b2"])
def test_the_last_digits_are_no_number(text: str) -> None:
    assert last_number(text) is None


@given(PIECES)
@example(["\\boxed{", "```", "}", "\\boxed{", "}"])
def test_any_text_is_read(pieces: list[str]) -> None:
    text = "".join(pieces)
    for answer in (last_tagged(text, "answer"), last_code_block([text])):
        assert answer is None or answer.strip() in text
    # Several boxes are one answer, with commas between them.
    assert all(part.strip() in text for part in (last_boxed(text) or "").split(", "))


@given(st.text(alphabet="ab{}\\ \n", max_size=20).filter(lambda t: "{" not in t and "}" not in t and "\\" not in t))
def test_a_boxed_answer_is_found_behind_anything(answer: str) -> None:
    assert last_boxed(f"\\boxed{{junk}} {{ \\boxed{{{answer}}} }}") == answer.strip()


def test_long_texts_take_linear_time() -> None:
    """Each of these takes hours if it is read once a beginning."""
    n = 100_000
    assert last_code_block(["```python\n" * n]) is not None
    assert last_code_block(["```python " * n]) is None
    assert last_number("1," * n) is None
    assert last_number("1" + " " * n) == 1
    assert last_tagged("<answer>" * n, "answer") is None
