from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.formats import HERMES

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def wrap(payload: str) -> str:
    return f"<tool_call>\n{payload}\n</tool_call>"


def test_finds_name_arguments_and_input() -> None:
    text = f"hm {wrap(json.dumps({'name': 'calculator', 'arguments': {'expression': '1+1'}}))} end"
    [call] = HERMES.find_calls(text)
    assert (call.name, call.input, call.arguments, call.error) == ("calculator", "1+1", {"expression": "1+1"}, None)
    assert text[: call.start] == "hm "
    assert text[call.end :] == " end"


@given(st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=4))
def test_arguments_survive_the_round_trip(name: str, arguments: dict[str, object]) -> None:
    [call] = HERMES.find_calls(wrap(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)))
    assert (call.name, call.error) == (name, None)
    assert call.arguments == arguments


def test_several_arguments_become_json() -> None:
    [call] = HERMES.find_calls(wrap('{"name": "f", "arguments": {"a": "x", "b": "y"}}'))
    assert json.loads(call.input) == {"a": "x", "b": "y"}


def test_arguments_may_be_a_json_string_as_openai_gives_them() -> None:
    [call] = HERMES.find_calls(wrap(json.dumps({"name": "f", "arguments": '{"a": 1}'})))
    assert call.arguments == {"a": 1}


def test_line_ends_inside_strings_are_allowed() -> None:
    [call] = HERMES.find_calls(wrap('{"name": "f", "arguments": {"code": "a\nb"}}'))
    assert call.input == "a\nb"


@pytest.mark.parametrize(
    ("payload", "name", "words"),
    [
        ('{"name": "f", "arguments": {"a": }}', "f", "not valid JSON"),
        ("print(1)", "", "not valid JSON"),
        ("", "", "not valid JSON"),
        ("[1]", "", "a JSON list, not an object"),
        ('{"arguments": {}}', "", 'no "name"'),
        ('{"name": 3}', "", 'no "name"'),
        ('{"name": "f", "arguments": [1]}', "f", '"arguments" of this call is a JSON list'),
        ('{"name": "f"} trailing', "f", "something follows its end"),
        ('{"name": "f", "arguments": {"n": ' + "9" * 5000 + "}}", "f", "number that is too long"),
        ("[" * 200_000, "", "nested too deeply"),
    ],
)
def test_a_broken_call_says_why(payload: str, name: str, words: str) -> None:
    [call] = HERMES.find_calls(wrap(payload))
    assert call.name == name
    assert call.error is not None
    assert words in call.error


def test_a_closing_tag_inside_a_string_does_not_end_the_call() -> None:
    code = "print('</tool_call>')"
    text = wrap(json.dumps({"name": "f", "arguments": {"code": code}})) + wrap('{"name": "g"}')
    assert [(call.name, call.error) for call in HERMES.find_calls(text)] == [("f", None), ("g", None)]
    assert HERMES.find_calls(text)[0].input == code


def test_a_closing_tag_cut_off_is_supplied_if_the_json_is_whole() -> None:
    [call] = HERMES.find_calls('<tool_call>\n{"name": "f", "arguments": {}}\n')
    assert (call.error, call.missing) == (None, "</tool_call>")
    assert HERMES.render("1", call) == "</tool_call>\n<tool_response>\n1\n</tool_response>\n"


def test_json_cut_off_is_an_error() -> None:
    [call] = HERMES.find_calls('<tool_call>\n{"name": "f", "argum')
    assert (call.name, call.missing) == ("f", "")
    assert call.error is not None


def test_a_call_in_a_response_is_none() -> None:
    assert HERMES.find_calls(f"<tool_response>{wrap('{}')}</tool_response>") == []


def test_usage_holds_each_signature_as_json() -> None:
    from verl_tool.servers.tools import tool_class
    from verl_tool.servers.tools.finish import FinishTool

    usage = HERMES.usage([tool_class("calculator")().describe(), FinishTool().describe()])
    lines = usage.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line)["function"]["name"] for line in lines] == ["calculator", "finish"]
    assert len(HERMES.find_calls(usage)) >= 1
