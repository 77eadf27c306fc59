"""The calls of several formats in one action."""

from __future__ import annotations

import pytest

from verl_tool.formats import ALL_FORMATS, HERMES, PYTHON_TAGS, TOOL_TAGS
from verl_tool.formats.find import calls_sent, find_calls, last_tag

JSON = '{"name": "add", "arguments": {"a": 1}}'


def test_calls_come_in_the_order_of_the_text_and_do_not_overlap() -> None:
    action = f"<tool>{JSON}</tool> <python>1 <tool>x</tool></python> <tool_call>{JSON}</tool_call>"
    found = find_calls(action, ALL_FORMATS)
    assert [call.name for call in found] == ["add", "python", "add"]
    assert [call.format for call in found] == [TOOL_TAGS, PYTHON_TAGS, HERMES]
    assert [call.name for call in find_calls(action, ALL_FORMATS, {"python"})] == ["python"]


@pytest.mark.parametrize(
    ("action", "name", "payload"),
    [
        ("Well: <reverse>abc</reverse>\n", "reverse", "abc"),
        ("<a>1</a> then <b>2</b>", "b", "2"),
        ("<a>1</a><a>2</a>", "a", "2"),
    ],
)
def test_a_tool_s_own_tag_is_known_by_the_action_s_end(action: str, name: str, payload: str) -> None:
    (call,) = calls_sent(action, ALL_FORMATS)
    assert (call.name, call.input) == (name, payload)


@pytest.mark.parametrize(
    "action", ["", "words", "</a>", "<a>1", "<a>1</a> and more", "<b>1</a>", "<a>1</ a>", "<result>1</result>", "a</"]
)
def test_no_other_text_is_taken_for_a_call(action: str) -> None:
    assert last_tag(action) == []


def test_a_format_s_call_goes_before_a_tag() -> None:
    (call,) = calls_sent("<python>print(1)</python>", ALL_FORMATS)
    assert call.format is PYTHON_TAGS


def test_a_long_text_of_openings_costs_no_more_than_its_length() -> None:
    assert len(last_tag("<a>" * 100_000 + "</a>")) == 1
