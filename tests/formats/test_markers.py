from __future__ import annotations

import pytest
from hypothesis import given

from tests.formats.strategies import texts
from verl_tool.formats import BUILT_IN_MARKERS, claim, escape_markers
from verl_tool.formats.markers import contains_marker


@given(texts)
def test_nothing_claimed_is_left(text: str) -> None:
    cleaned = escape_markers(text)
    assert not any(marker in cleaned for marker in BUILT_IN_MARKERS)
    assert not contains_marker(cleaned, 0)


@given(texts)
def test_only_blanks_are_put_in(text: str) -> None:
    assert escape_markers(text).replace(" ", "") == text.replace(" ", "")


@given(texts)
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    once = escape_markers(text)
    assert escape_markers(once) == once


def test_overlapping_marks_are_all_broken() -> None:
    claim("@@@")
    assert "@@@" not in escape_markers("@@@@@ a @@@ b")


@pytest.mark.parametrize("string", ["", "ab", " ab", "ab ", "< a"])
def test_what_a_blank_cannot_break_up_is_refused(string: str) -> None:
    with pytest.raises(ValueError, match="cannot mark a call"):
        claim(string)
