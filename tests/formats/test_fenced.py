from __future__ import annotations

import pytest
from hypothesis import given

from tests.formats.strategies import plain, texts
from verl_tool.formats import FENCED, WEBARENA, format_by_name


def found(text: str) -> list[tuple[str, str]]:
    return [(call.name, call.input) for call in FENCED.find_calls(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\nprint(1)\n```", [("python", "print(1)\n")]),
        ("Look: ```python\nprint(1)\n```\nthen", [("python", "print(1)\n")]),
        ("```python\nprint(1)```", [("python", "print(1)")]),
        ("``` python \r\nprint(1)\r\n```\r\n", [("python", "print(1)\r\n")]),
        ("```python\na\n```\nand\n```python\nb\n```\n", [("python", "a\n"), ("python", "b\n")]),
        ("```json\n{}\n```\n```py\n1\n```", [("json", "{}\n"), ("py", "1\n")]),
        ('```python\ns = "```"\n```', [("python", 's = "```"\n')]),
        ("````python\n'''\n```\n'''\n````", [("python", "'''\n```\n'''\n")]),
        ("  ```python\n  print(1)\n  ```", [("python", "  print(1)\n")]),
        ("```python\n```", [("python", "")]),
        ("```\nplain\n```", []),
        ("```python print(1)```", []),
        ("```python\nprint(1)", []),
        ("```python\na\n```python\nb\n```", [("python", "b\n")]),
        ("`python`", []),
    ],
)
def test_finds(text: str, expected: list[tuple[str, str]]) -> None:
    assert found(text) == expected


@given(plain.map(lambda text: text.replace("\n", " ")), plain)
def test_payload_is_exact(before: str, payload: str) -> None:
    [call] = FENCED.find_calls(f"{before}```python\n{payload}\n```\n")
    assert (call.input, call.start) == (payload + "\n", len(before))


def test_an_output_block_is_no_call_and_hides_what_it_holds() -> None:
    assert found("```output\n1\n```") == []
    assert found("```python\na\n```\n```output\n<x>\n```\n```python\nb\n```") == [("python", "a\n"), ("python", "b\n")]
    assert found("```tool_response") == []


def test_an_output_block_that_the_model_opened_is_gone_on_with() -> None:
    [call] = FENCED.find_calls("```python\nprint(1)\n```\n```output")
    assert call.output_opened
    assert FENCED.render("1", call) == "\n1\n```\n"


def test_an_output_block_opened_by_the_closing_fence_itself() -> None:
    [call] = FENCED.find_calls("```python\nprint(1)\n```output")
    assert (call.input, call.output_opened) == ("print(1)\n", True)


def test_of_several_blocks_the_first_observation_goes_on_with_the_opened_one() -> None:
    calls = FENCED.find_calls("```json\n1\n```\n```python\na\n```\n```python\nb\n```\n```output\n")
    assert [call.output_opened for call in calls] == [False, True, False]


def test_renders() -> None:
    assert FENCED.render("1") == "\n```output\n1\n```\n"
    assert FENCED.render("```python\n1\n```\n````") == "\n```output\n` ``python\n1\n` ``\n` ` ``\n```\n"


def test_webarenas_commands_are_found_on_one_line_or_several() -> None:
    text = "<think>Look.</think>\n```click [12]``` and\n```\ntype [7] [a [b]] [1]\n```\n```go_back```"
    calls = WEBARENA.find_calls(text)
    assert [(call.name, call.input) for call in calls] == [
        ("browser", "click [12]"),
        ("browser", "type [7] [a [b]] [1]"),
        ("browser", "go_back"),
    ]
    assert text[calls[0].start : calls[0].end] == "```click [12]```"


@pytest.mark.parametrize(
    "text",
    ["```python\nclick [1]\n```", "```click [1]", "click [1]", "```clicks [1]```", "```click(1)```", "```type x```"],
)
def test_other_fences_are_no_commands(text: str) -> None:
    assert WEBARENA.find_calls(text) == []


@given(texts)
def test_an_observation_of_a_command_holds_none(output: str) -> None:
    assert WEBARENA.find_calls(WEBARENA.render(output)) == []
    assert format_by_name("webarena") is WEBARENA
