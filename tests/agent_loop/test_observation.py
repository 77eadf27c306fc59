from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_model import ToyTokenizer

from verl_tool.agent_loop.observation import TRUNCATION_MARK, truncate
from verl_tool.agent_loop.options import Side

TOKENIZER = ToyTokenizer(words=["ab", "...(", ")...z", "aaaa"])
SIDES = st.sampled_from(["left", "right", "middle"])


@given(st.text("ab.z(é€𝄞", max_size=300), st.integers(1, 80), SIDES)
def test_what_is_left_fits_and_holds_whole_characters(text: str, limit: int, side: Side) -> None:
    cut = truncate(text, limit, side, TOKENIZER)
    assert len(TOKENIZER.encode(cut)) <= limit
    if len(TOKENIZER.encode(text)) <= limit:
        assert cut == text
        return
    assert "\ufffd" not in cut
    head, mark, tail = cut.partition(TRUNCATION_MARK) if "(" not in text else ("", "", "")
    assert not mark or (text.startswith(head) and text.endswith(tail))
    assert not mark or side != "left" or head == ""
    assert not mark or side != "right" or tail == ""


@given(st.integers(20, 200), SIDES)
def test_no_more_is_dropped_than_must_be(limit: int, side: Side) -> None:
    assert len(TOKENIZER.encode(truncate("q" * 500, limit, side, TOKENIZER))) == limit


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_megabytes_are_cut_before_they_are_encoded(side: Side) -> None:
    encoded: list[int] = []

    class Counting(ToyTokenizer):
        def encode(self, text: str) -> list[int]:
            encoded.append(len(text))
            return super().encode(text)

    cut = truncate("é" * 10_000_000, 30, side, Counting())
    assert cut.count("é") >= 6
    assert max(encoded) <= 30 * 64


def test_a_limit_below_the_mark_leaves_nothing() -> None:
    assert truncate("q" * 50, 3, "left", TOKENIZER) == ""
