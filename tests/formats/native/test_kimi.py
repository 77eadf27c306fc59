from __future__ import annotations

import pytest

from verl_tool.formats import KIMI

BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def call(call_id: str, arguments: str) -> str:
    return f"{BEGIN}{call_id}{ARGUMENTS}{arguments}{END}"


def section(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def test_finds_all_calls_of_a_turn() -> None:
    found = KIMI.find_calls("Well." + section(call("functions.f:0", '{"a": "1"}'), call("functions.g:1", "{}")))
    assert [(each.name, each.id, each.arguments) for each in found] == [
        ("f", "functions.f:0", {"a": "1"}),
        ("g", "functions.g:1", {}),
    ]


@pytest.mark.parametrize("call_id", ["f:0", "functions.f", " functions.f:12\n"])
def test_names_are_read_from_other_ids_too(call_id: str) -> None:
    [found] = KIMI.find_calls(call(call_id, "{}"))
    assert (found.name, found.id) == ("f", call_id.strip())


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (call("functions.f:0", "{"), "f", "not valid JSON"),
        (section(f"{BEGIN}functions.f:0{ARGUMENTS}{{"), "f", "not valid JSON"),
        (f"{BEGIN}functions.f:0{END}", "f", f"lacks {ARGUMENTS}"),
        (call("", "{}"), "", "has no name"),
    ],
)
def test_a_broken_call_says_why(text: str, name: str, words: str) -> None:
    [found] = KIMI.find_calls(text)
    assert found.name == name
    assert found.error is not None
    assert words in found.error
