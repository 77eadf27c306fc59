from __future__ import annotations

import pytest

from verl_tool.formats import MISTRAL

ID = "abcdefghi"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": "1"}, "id": "abcdefghi"}]', [("f", "1", ID)]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": "1"}}, {"name": "g"}]', [("f", "1", None), ("g", "{}", None)]),
        ('[TOOL_CALLS]{"name": "f", "arguments": {"a": "1"}}', [("f", "1", None)]),
        ('[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": "1"}', [("f", "1", ID)]),
        ('[TOOL_CALLS]f[ARGS]{"a": "1"}[TOOL_CALLS]g{"b": "2"}', [("f", "1", None), ("g", "2", None)]),
        ("[TOOL_CALLS]f[ARGS]{}</s>", [("f", "{}", None)]),
        ('[THINK][TOOL_CALLS]no[ARGS]{}[/THINK][TOOL_CALLS]f[ARGS]{"a": "1"}', [("f", "1", None)]),
        ("no call", []),
    ],
)
def test_finds(text: str, expected: list[tuple[str, str, str | None]]) -> None:
    found = MISTRAL.find_calls(text)
    assert [(each.name, each.input, each.id) for each in found] == expected
    assert all(each.error is None for each in found)


def test_a_list_s_calls_stand_where_their_objects_do() -> None:
    text = '[TOOL_CALLS] [{"name": "f"}, {"name": "g"}]'
    assert [text[each.start : each.end] for each in MISTRAL.find_calls(text)] == [
        '[TOOL_CALLS] [{"name": "f"}',
        '{"name": "g"}]',
    ]


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ('[TOOL_CALLS] [{"name": "f", "arguments": ', "f", "not valid JSON"),
        ("[TOOL_CALLS] []", "", "the list is empty"),
        ("[TOOL_CALLS] f(1)", "", "no call follows"),
        ("[TOOL_CALLS]f[ARGS]a=1", "f", "not valid JSON"),
        ("[TOOL_CALLS]f[ARGS][1]", "f", "a JSON list, not an object"),
        ("[TOOL_CALLS]", "", "no call follows"),
    ],
)
def test_a_broken_call_says_why(text: str, name: str, words: str) -> None:
    [found] = MISTRAL.find_calls(text)
    assert found.name == name
    assert found.error is not None
    assert words in found.error


def test_what_stands_before_a_broken_one_is_found() -> None:
    found = MISTRAL.find_calls('[TOOL_CALLS] [{"name": "f"}, {"name": "g", ]')
    assert [(each.name, each.error is None) for each in found] == [("f", True), ("g", False)]
