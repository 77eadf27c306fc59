"""Actions as models write them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tool.browser.action_syntax import ActionSyntaxError, BrowserAction, parse_actions, parse_arguments
from verl_tool.browser.actions import ACTIONS, bind, validate_address


def bound(text: str) -> list[tuple[str, dict[str, Any]]]:
    return [(function.__name__, arguments) for function, arguments in map(bind, parse_actions(text))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('click("12")', [("click", {"bid": 12})]),
        ("click(12)", [("click", {"bid": 12})]),
        ("click('[12]', button='right')", [("click", {"bid": 12, "button": "right"})]),
        (
            'fill("7", "a b")\npress("7", "Enter")',
            [("fill", {"bid": 7, "value": "a b"}), ("press", {"bid": 7, "key_comb": "Enter"})],
        ),
        ('select_option("3", ["a", "b"])', [("select_option", {"bid": 3, "options": ["a", "b"]})]),
        ("scroll(0, 200)", [("scroll", {"delta_x": 0.0, "delta_y": 200.0})]),
        ("go_back", [("go_back", {})]),
        ("noop()", [("noop", {})]),
        ('open("example.org")', [("goto", {"url": "example.org"})]),
        ("tab_focus(1)", [("tab_focus", {"index": 1})]),
        ("send_msg_to_user('42')", [("send_msg_to_user", {"text": "42"})]),
        ("click [12]", [("click", {"bid": 12})]),
        (
            "type [16] [Cristiano Ronaldo] [1]",
            [("type_text", {"bid": 16, "text": "Cristiano Ronaldo", "press_enter": True})],
        ),
        ("type [16] [x] [0]", [("type_text", {"bid": 16, "text": "x", "press_enter": False})]),
        ("type [16] [a [b] c]", [("type_text", {"bid": 16, "text": "a [b] c", "press_enter": True})]),
        ("scroll [direction=down]", [("scroll_page", {"pages": 1.0})]),
        ("press [Control+a]", [("keyboard_press", {"key": "Control+a"})]),
        ("tab_focus [tab_index=1]", [("tab_focus", {"index": 1})]),
        ("close_tab", [("tab_close", {})]),
        ("stop [Paris]", [("send_msg_to_user", {"text": "Paris"})]),
        ("stop []", [("send_msg_to_user", {"text": ""})]),
    ],
)
def test_actions_of_browsergym_and_webarena(text: str, expected: list[tuple[str, dict[str, Any]]]) -> None:
    assert bound(text) == expected


def test_a_json_call_names_the_action_or_holds_it_whole() -> None:
    assert parse_arguments({"action": "click", "id": 12}) == [BrowserAction("click", (), {"id": 12})]
    assert bind(parse_arguments({"action": "fill", "id": 7, "text": "x"})[0])[1] == {"bid": 7, "value": "x"}
    assert bind(parse_arguments({"action": "press", "id": 7, "key": "Enter"})[0])[1] == {"bid": 7, "key_comb": "Enter"}
    assert parse_arguments({"input": "click(1)"}) == [BrowserAction("click", [1], {})]
    for arguments in ({}, {"action": 1}, {"action": "click(1)", "id": 2}):
        with pytest.raises(ActionSyntaxError):
            parse_arguments(arguments)


@pytest.mark.parametrize(
    "text",
    [
        *("click(1", "1 + 1", "import os", "page.click(1)", "click(open('/etc/passwd'))", "click(__import__('os'))"),
        *(
            "click(*[1])",
            "fly(1)",
            "click()",
            "click('a b')",
            "click(1, 2, 3, 4)",
            "tab_focus('x')",
            "scroll(1e999, 0)",
        ),
        *("click [12", "scroll [left]", "click(1)\n" * 11, "(" * 9000, "fill(1, 'x') if 1 else 2"),
    ],
)
def test_what_is_no_action_is_rejected_in_words(text: str) -> None:
    with pytest.raises(ActionSyntaxError) as caught:
        bound(text)
    assert len(str(caught.value)) < 1000


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=200) | st.builds("{}({})".format, st.sampled_from(list(ACTIONS)), st.text(max_size=60)))
def test_any_text_is_actions_or_rejected(text: str) -> None:
    with contextlib.suppress(ActionSyntaxError):
        bound(text)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "data:text/html,x", "javascript:f()", "chrome://version", "", "view-source:http://a"]
)
def test_only_addresses_of_the_web_are_opened(url: str) -> None:
    with pytest.raises(ActionSyntaxError):
        validate_address(url)
    assert validate_address("example.org/a") == "https://example.org/a"
    assert validate_address("localhost:80/a") == "https://localhost:80/a"
