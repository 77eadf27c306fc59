"""A program's call: JSON and nothing else, its answer as it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl_tool.formats import ALL_FORMATS
from verl_tool.formats.direct import DIRECT


def test_it_is_the_whole_action_and_its_answer_is_untouched() -> None:
    action = '{"name": "f", "arguments": {"x": "</tool_call>", "y": 1}}'
    [call] = DIRECT.find_calls(action)
    assert (call.name, call.arguments, call.input) == ("f", {"x": "</tool_call>", "y": 1}, "</tool_call>")
    assert (call.start, call.end, call.error) == (0, len(action), None)
    assert DIRECT.render("<result>", call) == "<result>"


def test_no_model_can_write_it() -> None:
    assert DIRECT not in ALL_FORMATS


@given(st.text())
def test_any_text_is_one_call_and_what_is_wrong_with_it_is_said(text: str) -> None:
    [call] = DIRECT.find_calls(text)
    assert call.error is not None or call.name
