"""Text as it comes against text at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from toy_model import ToyTokenizer

from eval_service.text_stream import Detokenizer, StopCut, TurnText, turn_text

TOKENIZER = ToyTokenizer(words=["wörd", "stop"])
END = frozenset(TOKENIZER.eos_token_ids)
ids = st.lists(st.sampled_from(list(TOKENIZER.vocabulary)), max_size=60)
texts = st.text(alphabet=st.sampled_from("añ€😀\ufffdbst op"), max_size=30)


def in_pieces(tokens: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    bounds = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    return [list(tokens[a:b]) for a, b in itertools.pairwise(bounds)]


@given(ids, st.lists(st.integers(0, 100)))
def test_what_is_given_out_is_the_text_of_all_tokens(tokens: list[int], cuts: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    given_out = "".join(detokenizer.push(piece) for piece in in_pieces(tokens, cuts)) + detokenizer.finish()
    assert given_out == TOKENIZER.decode(tokens)


@given(texts)
def test_no_character_is_split(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push([token]) for token in TOKENIZER.encode(text)]
    assert all(text.startswith("".join(pieces[:n])) for n in range(len(pieces) + 1))


def test_text_comes_as_soon_as_it_is_whole() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    euro = list("€".encode())
    assert [detokenizer.push([token]) for token in [*euro, ord("a")]] == ["", "", "€", "a"]


def test_endless_rubbish_is_not_held_back_for_ever() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    first = "".join(detokenizer.push([0xE2]) for _ in range(200))
    assert len(first) > 100
    assert first + detokenizer.finish() == "\ufffd" * 200


@given(texts, st.lists(st.text(alphabet="ab st", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 100)))
def test_a_stop_string_and_what_follows_is_never_shown(text: str, stops: list[str], cuts: list[int]) -> None:
    cut = StopCut(stops)
    bounds = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    shown = "".join(cut.push(text[a:b]) for a, b in itertools.pairwise(bounds)) + cut.finish()
    # Letter by letter, a stop string that ends earlier counts, even if another one began before it.
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if not any(stop in text for stop in stops):
        assert shown == text


def test_the_beginning_of_a_stop_string_waits() -> None:
    cut = StopCut(["stop"])
    assert [cut.push(c) for c in "a sto s"] == ["a", " ", "", "", "", "sto ", ""]
    assert cut.finish() == "s"
    assert not cut.stopped


@given(texts, st.integers(0, 3))
def test_tokens_that_end_the_turn_are_left_out(text: str, ends: int) -> None:
    end = min(END)
    tokens = [*TOKENIZER.encode(text), *[end] * ends]
    assert turn_text(tokens, TOKENIZER, END, ()) == TOKENIZER.decode(TOKENIZER.encode(text))
    stream = TurnText(TOKENIZER, END, ())
    shown = "".join(stream.push([token]) for token in tokens) + stream.finish()
    assert shown == TOKENIZER.decode(TOKENIZER.encode(text))
    assert stream.ending() == [end] * ends


def test_an_end_token_within_the_turn_is_shown() -> None:
    end = min(END)
    assert turn_text([97, end, 98], TOKENIZER, END, ()) == "a<|im_end|>b"
