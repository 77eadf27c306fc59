"""Actions as OpenAI's tool calls."""

from __future__ import annotations

import json

from eval_service.openai.tool_calls import CallLog
from verl_tool.content.parts import TextPart
from verl_tool.formats import ALL_FORMATS


def test_calls_are_numbered_over_the_whole_trajectory_and_answered_by_id() -> None:
    log = CallLog("t", ALL_FORMATS)
    first = log.calls_in("<python>print(1)</python>")
    answer = log.message([TextPart("1")])
    second = log.calls_in('<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>')
    assert first[0] == {
        "index": 0,
        "id": "call_t_0",
        "type": "function",
        "function": {"name": "python", "arguments": '{"input":"print(1)"}'},
    }
    assert answer == {"index": 0, "role": "tool", "tool_call_id": "call_t_0", "content": "1"}
    assert (second[0]["index"], second[0]["function"]["name"]) == (1, "search")
    assert json.loads(second[0]["function"]["arguments"]) == {"query": "x"}
    assert log.message([TextPart("2")])["index"] == 1


def test_several_calls_of_one_action_have_one_answer_that_bears_the_last_id() -> None:
    log = CallLog("t", ALL_FORMATS)
    calls = log.calls_in("<python>1</python> <python>2</python>")
    assert [call["id"] for call in calls] == ["call_t_0", "call_t_1"]
    assert log.message([TextPart("both")])["tool_call_id"] == "call_t_1"


def test_an_action_without_a_call_has_an_answer_without_an_id() -> None:
    log = CallLog("t", ALL_FORMATS)
    log.calls_in("<python>1</python>")
    assert log.calls_in("what now?") == []
    assert log.message([TextPart("No tool call found.")])["tool_call_id"] is None


def test_a_tool_s_own_tag_is_a_call() -> None:
    (call,) = CallLog("t", ALL_FORMATS).calls_in("Well: <reverse>abc</reverse>")
    assert call["function"] == {"name": "reverse", "arguments": '{"input":"abc"}'}
