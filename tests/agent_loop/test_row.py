from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verl_tool.agent_loop.row import (
    build_call_extra,
    listed_tools,
    reject_media,
    row_turns,
    text_messages,
    uses_tools,
)
from verl_tool.errors import ConfigError


@pytest.mark.parametrize("value", [None, float("nan"), True, 1, np.True_, 1.0])
def test_a_row_uses_tools_unless_it_says_not(value: object) -> None:
    assert uses_tools(value, "row 0")


@pytest.mark.parametrize("value", [False, 0, np.False_, 0.0])
def test_a_row_may_say_that_it_uses_none(value: object) -> None:
    assert not uses_tools(value, "row 0")


@pytest.mark.parametrize("value", ["false", "yes", 2, []])
def test_what_is_neither_true_nor_false_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="row 7: use_tool is"):
        uses_tools(value, "row 7")


@pytest.mark.parametrize("empty", [None, [], "", {}, {"image": None}, float("nan"), np.array([])])
def test_a_column_without_content_is_no_image(empty: object) -> None:
    reject_media({"images": empty, "videos": empty, "prompt": "x"}, "row 3")


@pytest.mark.parametrize("held", [["a.png"], b"png", {"bytes": b"x"}, np.array(["a.png"]), object()])
@pytest.mark.parametrize("column", ["images", "videos", "multi_modal_data"])
def test_a_row_with_an_image_is_refused_by_name(held: object, column: str) -> None:
    with pytest.raises(ConfigError, match=f"row 3 has content in '{column}'"):
        reject_media({column: held}, "row 3")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "image"},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video", "video": "x.mp4"},
        {"image": "x.png"},
        3,
    ],
)
def test_a_part_that_is_no_text_is_refused_by_name(part: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(ConfigError, match="row 5, message 1"):
        text_messages(messages, "row 5")
    with pytest.raises(ConfigError, match="row 5, message 0 has content in 'images'"):
        text_messages([{"role": "user", "content": "hi", "images": ["x"]}], "row 5")


def test_parts_of_text_are_put_together() -> None:
    parts = np.array([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], dtype=object)
    assert text_messages([{"role": "user", "content": parts}], "row 0") == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("kwargs", "extra_info", "listed"),
    [
        (None, None, None),
        ({}, {"index": 3}, None),
        ({"tools": None}, {"tool_selection": None}, None),
        ({"tools": ["a", "b"]}, {}, ("a", "b")),
        ({"tools": np.array(["a"], dtype=object)}, {"tool_selection": ["a"]}, ("a",)),
        ({"tools": []}, {}, ()),
        ({"tools": []}, {"tool_selection": []}, ()),
        ({}, {"tool_selection": ["b"]}, ("b",)),
        ({}, {"tool_selection": []}, None),
    ],
)
def test_a_row_may_list_its_tools(kwargs: Any, extra_info: Any, listed: Any) -> None:
    assert listed_tools(kwargs, extra_info, "row 0") == listed


@pytest.mark.parametrize(
    ("kwargs", "extra_info", "words"),
    [
        ({"tools": "a"}, {}, "row 2: tools_kwargs.tools is 'a'; write a list of names"),
        ({"tools": {"a": 1}}, {}, "tools_kwargs.tools is"),
        ({}, {"tool_selection": [1]}, r"extra_info.tool_selection is \[1\]"),
        ({"tools": ["a"]}, {"tool_selection": ["b"]}, "one setting under two names"),
    ],
)
def test_what_is_no_list_of_tools_is_refused(kwargs: Any, extra_info: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        listed_tools(kwargs, extra_info, "row 2")


def test_tools_are_sent_what_the_row_gives_them_and_which_of_them_may_run() -> None:
    assert build_call_extra(None, None, "row 0") == {}
    assert build_call_extra({"unit": "m", "tools": ["a"]}, ("a",), "row 0") == {"unit": "m", "tool_names": ["a"]}
    assert build_call_extra({"unit": "m"}, None, "row 0") == {"unit": "m"}
    none = {"cpus": None, "memory_mb": None, "allowed_hosts": None}
    assert build_call_extra({"workspace_limits": none}, None, "row 0") == {}, "a column has the keys of all rows"
    limits = {**none, "memory_mb": 512.0, "allowed_hosts": np.array([], dtype=object)}
    sent = build_call_extra({"workspace_limits": limits}, None, "row 0")["workspace_limits"]
    assert sent == {"memory_mb": 512, "allowed_hosts": []}
    with pytest.raises(ConfigError, match=r"row 7: tools_kwargs\.workspace_limits\.memory_mb is 1"):
        build_call_extra({"workspace_limits": {"memory_mb": 1}}, None, "row 7")


@pytest.mark.parametrize(
    ("value", "turns"), [(None, None), (float("nan"), None), (0, 0), (np.int64(4), 4), (np.float64(2.0), 2)]
)
def test_a_row_may_have_its_own_number_of_turns(value: object, turns: int | None) -> None:
    assert row_turns(value, "row 0") == turns


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", [3], float("inf")])
def test_what_is_no_number_of_turns_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"row 6: max_turns is .*a whole number from 0"):
        row_turns(value, "row 6")
