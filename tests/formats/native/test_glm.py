from __future__ import annotations

import pytest

from verl_tool.formats import ALL_FORMATS, GLM, HERMES
from verl_tool.formats.find import find_calls

PAIR = "<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (f"<tool_call>f\n{PAIR}</tool_call>", {"city": "Oslo"}),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", {"a": "1"}),
        ("<tool_call>f\n</tool_call>", {}),
        ("<tool_call>f<arg_key>c</arg_key><arg_value></tool_call></arg_value></tool_call>", {"c": "</tool_call>"}),
        (f"<tool_call>f\n{PAIR}", {"city": "Oslo"}),
    ],
)
def test_finds_name_and_arguments(text: str, arguments: dict[str, str]) -> None:
    [found] = GLM.find_calls(text)
    assert (found.name, found.arguments, found.error) == ("f", arguments, None)


def test_calls_that_follow_one_another() -> None:
    found = GLM.find_calls(f"<think></think>\n<tool_call>f\n{PAIR}</tool_call>\n<tool_call>g\n</tool_call>")
    assert [each.name for each in found] == ["f", "g"]


@pytest.mark.parametrize(
    "text",
    ["<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", "<tool_call>f<arg_key>a</arg_value></tool_call>"],
)
def test_a_broken_call_says_why(text: str) -> None:
    [found] = GLM.find_calls(text)
    assert (found.name, found.end) == ("f", len(text))
    assert found.error is not None
    assert "<arg_key>KEY</arg_key>" in found.error
    assert HERMES.find_calls(text) == []


def test_a_call_without_arguments_goes_before_broken_json() -> None:
    [found] = find_calls("<tool_call>now</tool_call>", ALL_FORMATS)
    assert (found.name, found.format) == ("now", GLM)
