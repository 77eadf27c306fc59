from __future__ import annotations

import pytest

from verl_tool.formats import HERMES, QWEN3_CODER
from verl_tool.formats.find import find_calls


def call(body: str, name: str = "f") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (call(parameter("city", "Oslo") + parameter("days", "3")), {"city": "Oslo", "days": "3"}),
        (call(parameter("code", "for i in a:\n    print(i)")), {"code": "for i in a:\n    print(i)"}),
        (call(parameter("code", "print('</tool_call>')")), {"code": "print('</tool_call>')"}),
        (call(""), {}),
        ("<function=f><parameter=a>1</parameter></function>", {"a": "1"}),
        ("<tool_call><function=f><parameter=a>1</parameter>", {"a": "1"}),
    ],
)
def test_finds_name_and_arguments(text: str, arguments: dict[str, str]) -> None:
    [found] = QWEN3_CODER.find_calls(f"Well.\n{text}")
    assert (found.name, found.arguments, found.error) == ("f", arguments, None)
    assert found.start == len("Well.\n")


def test_calls_that_follow_one_another() -> None:
    found = QWEN3_CODER.find_calls(call(parameter("a", "1"), "one") + "\n" + call(parameter("b", "2"), "two"))
    assert [(each.name, each.arguments) for each in found] == [("one", {"a": "1"}), ("two", {"b": "2"})]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (call("<parameter=a>\n1\n"), "<parameter=a> is not closed"),
        (call("city: Oslo\n"), "is no argument"),
        ("<tool_call><function=f>" + parameter("a", "1") + "</tool_call> and on", "is no argument"),
    ],
)
def test_a_broken_call_says_why(text: str, words: str) -> None:
    [found] = QWEN3_CODER.find_calls(text)
    assert found.name == "f"
    assert found.error is not None
    assert words in found.error
    assert "<function=NAME>" in found.error


def test_it_is_no_broken_call_of_hermes() -> None:
    assert HERMES.find_calls(call(parameter("a", "1"))) == []
    [found] = find_calls(call(parameter("a", "1")), [HERMES, QWEN3_CODER])
    assert found.format is QWEN3_CODER


def test_a_closing_tag_cut_off_is_supplied() -> None:
    [found] = QWEN3_CODER.find_calls("<tool_call><function=f><parameter=a>1</parameter>")
    assert QWEN3_CODER.render("2", found) == "</tool_call>\n<tool_response>\n2\n</tool_response>\n"
