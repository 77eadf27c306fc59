"""Tokens of calls, against the text that they write."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from toy_model import ToyTokenizer

from verl_tool.agent_loop.action_tokens import action_mask
from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory
from verl_tool.formats import loop_formats

CALL = "<request><calculator>1+1<call>"


def masked_text(*turns: tuple[Author, str]) -> tuple[str, list[int], int]:
    """The text of tokens with mask 1, the mask, and the number of response tokens."""
    tokenizer = ToyTokenizer()
    segments = tuple(Segment(author, tuple(tokenizer.encode(text)), text=text) for author, text in turns)
    trajectory = Trajectory("t", (Segment(Author.PROMPT, (1,)), *segments), StopReason.ANSWERED)
    mask = action_mask(trajectory, tokenizer)
    tokens = [token for token, call in zip(trajectory.response_ids, mask, strict=True) if call]
    return tokenizer.decode(tokens), mask, len(trajectory.response_ids)


def test_a_call_amid_text():
    text, mask, length = masked_text((Author.MODEL, f"I add: {CALL} and wait"), (Author.TOOL, CALL))
    assert text == CALL
    assert len(mask) == length


def test_a_tool_s_words_are_no_call():
    assert masked_text((Author.TOOL, CALL))[0] == ""


def test_no_call_no_tokens():
    assert masked_text((Author.MODEL, "just words"))[0] == ""


def test_a_call_in_a_named_format():
    tokenizer, turn = ToyTokenizer(), "so <reverse>abc</reverse>"
    segment = Segment(Author.MODEL, tuple(tokenizer.encode(turn)), text=turn)
    trajectory = Trajectory("t", (Segment(Author.PROMPT, (1,)), segment), StopReason.ANSWERED)
    mask = action_mask(trajectory, tokenizer, loop_formats(["<reverse>"]))
    called = [token for token, call in zip(segment.tokens, mask, strict=True) if call]
    assert tokenizer.decode(called) == "<reverse>abc</reverse>"
    assert sum(action_mask(trajectory, tokenizer)) == 0


@given(st.text(alphabet="ab é漢 \n", max_size=30), st.text(alphabet="ab é漢 \n", max_size=30))
def test_any_text_around_a_call(before, after):
    text, _, _ = masked_text((Author.MODEL, before + CALL + after))
    assert CALL in text
    # A character of several tokens may stand at the border.
    assert len(text) <= len(CALL) + 2
