from __future__ import annotations

import pytest

from verl_tool.formats import DEEPSEEK

BEGIN, END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def v3(name: str, arguments: str) -> str:
    return f"{BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{END}"


def v31(name: str, arguments: str) -> str:
    return f"{BEGIN}{name}{SEPARATOR}{arguments}{END}"


@pytest.mark.parametrize("one", [v3, v31])
def test_finds_all_calls_of_a_turn(one) -> None:
    first, second = one("f", '{"a": "1"}'), one("g", "{}")
    text = f"Well.<｜tool▁calls▁begin｜>{first}\n{second}<｜tool▁calls▁end｜>"
    found = DEEPSEEK.find_calls(text)
    assert [(each.name, each.arguments, each.error) for each in found] == [("f", {"a": "1"}, None), ("g", {}, None)]
    assert text[found[0].start : found[0].end] == first


@pytest.mark.parametrize(
    "text", [f'{BEGIN}f{SEPARATOR}{{"a": "1"}}', f'{BEGIN}f{SEPARATOR}{{"a": "1"}}<｜tool▁calls▁end｜>']
)
def test_a_closing_token_may_be_left_out(text: str) -> None:
    [found] = DEEPSEEK.find_calls(text)
    assert (found.arguments, found.error) == ({"a": "1"}, None)


def test_a_function_may_be_called_function() -> None:
    [found] = DEEPSEEK.find_calls(v31("function", '{"a": 1}'))
    assert (found.name, found.arguments) == ("function", {"a": 1})


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (v31("f", '{"a": }'), "f", "not valid JSON"),
        (v3("f", "a = 1"), "f", "not valid JSON"),
        (v31("f", "[1]"), "f", "a JSON list, not an object"),
        (f"{BEGIN}f{END}", "f", f"lacks {SEPARATOR}"),
        (v31("", "{}"), "", "has no name"),
    ],
)
def test_a_broken_call_says_why(text: str, name: str, words: str) -> None:
    [found] = DEEPSEEK.find_calls(text)
    assert found.name == name
    assert found.error is not None
    assert words in found.error
