"""What is left of a turn without its thoughts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.formats.scan import THOUGHTS, remove_thoughts

MARKERS = [*THOUGHTS, *THOUGHTS.values()]
pieces = st.lists(st.sampled_from([*MARKERS, "a", "<", " "]))


@pytest.mark.parametrize(("opening", "closing"), THOUGHTS.items())
def test_closed_and_unclosed_thoughts_are_removed(opening: str, closing: str) -> None:
    for text, left in {
        "a": "a",
        f"{opening}x{closing}a": "a",
        f"x{closing}a": "a",
        f"{opening}x{closing}{opening}y{closing}a": "a",
        f"{opening}x": "",
        f"{opening}x{opening}y": "",
        f"{opening}x{closing}a{opening}y": "a",
        f"a{opening}y": "a",
    }.items():
        assert remove_thoughts(text) == left, text


def test_a_foreign_closing_does_not_close_a_thought() -> None:
    assert remove_thoughts("<think>x [/THINK] y") == ""


@given(pieces)
def test_no_marker_is_left(parts: list[str]) -> None:
    text = "".join(parts)
    left = remove_thoughts(text)
    assert left in text
    assert not any(marker in left for marker in MARKERS)
    assert remove_thoughts(left) == left
