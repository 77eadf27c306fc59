"""Text as it comes against text at once."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import ToyTokenizer

pytest.importorskip("transformers")

from real_tokenizers import NAMES, shape

from eval_service.openai.streaming.text_stream import Detokenizer, StopCut, TurnText, turn_text
from verl_tool.agent_loop.tokenizer import HFTokenizer

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


@functools.cache
def tokenizer(name: str) -> HFTokenizer:
    return HFTokenizer(shape(name).tokenizer)


def streamed(tokens: Sequence[int], cuts: Sequence[int], name: str, stops: Sequence[str] = ()) -> list[str]:
    turn = TurnText(tokenizer(name), tokenizer(name).eos_token_ids, stops)
    return [*(turn.push(piece) for piece in in_pieces(tokens, cuts)), turn.finish()]


SCRIPTS = st.text(st.sampled_from("the ansé日本語😀👩\u200d👩\u0301\n\ufffd\u0e33ก"), max_size=30)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(text=SCRIPTS, cuts=st.lists(st.integers(0, 300)))
def test_a_stream_equals_the_text_at_once(name: str, text: str, cuts: list[int]) -> None:
    tokens = tokenizer(name).encode(text)
    assert "".join(streamed(tokens, cuts, name)) == tokenizer(name).decode(tokens)


@pytest.mark.parametrize("name", ["qwen", "gemma", "mistral_v1", "t5"])
@settings(max_examples=25)
@given(chance=st.randoms(use_true_random=False), n=st.integers(0, 90), cuts=st.lists(st.integers(0, 300)))
def test_a_stream_of_any_tokens_equals_the_text_at_once(
    name: str, chance: random.Random, n: int, cuts: list[int]
) -> None:
    tokens = chance.choices(range(len(shape(name).tokenizer)), k=n)
    ends = tokenizer(name).eos_token_ids
    assert "".join(streamed(tokens, cuts, name)) == turn_text(tokens, tokenizer(name), ends, ())
    assert "".join(streamed(tokens, range(len(tokens)), name)) == turn_text(tokens, tokenizer(name), ends, ())


@pytest.mark.parametrize("name", ["qwen", "gemma"])
@settings(max_examples=25)
@given(text=SCRIPTS, stops=st.lists(st.text("the ans\n日", min_size=1, max_size=4), max_size=3))
def test_a_stream_stops_where_the_text_at_once_stops(name: str, text: str, stops: list[str]) -> None:
    tokens = tokenizer(name).encode(text)
    at_once = turn_text(tokens, tokenizer(name), frozenset(), stops)
    assert "".join(streamed(tokens, range(len(tokens)), name, stops)) == at_once


@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_words_come_at_once_and_broken_bytes_never(name: str) -> None:
    tokens = tokenizer(name).encode("the 日本 the")
    pieces = streamed(tokens, range(len(tokens)), name)
    assert "".join(pieces) == "the 日本 the"
    assert "".join(pieces[: pieces.index(next(p for p in pieces if "日" in p))]).startswith("the")
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_in_a_row_are_not_decoded_anew_for_each_of_them() -> None:
    decoded: list[int] = []

    class Counting(HFTokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            decoded.append(len(token_ids))
            return super().decode(token_ids)

    counting = Counting(shape("gemma").tokenizer)
    detokenizer = Detokenizer(counting)
    tokens = counting.encode("日" * 1000)
    given_out = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.finish()
    assert given_out == counting.decode(tokens)
    assert len(decoded) < 300
