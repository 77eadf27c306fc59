"""The BM25 index against the one that bm25s itself makes of the same words."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.retrieval import bm25, bm25_builder
from verl_tool.retrieval.bm25 import K1, B, Bm25Index, stop_words, words_of
from verl_tool.retrieval.bm25_builder import merge_parts, write_part
from verl_tool.retrieval.passage import RetrievalError

WORDS = ["amber", "bridge", "castle", "dorin", "the", "x", "Élan", "42", "harbour", "salt"]
texts = st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), min_size=1, max_size=12)


def index_of(folder: Path, corpus: list[str], part: int = 5, at_a_time: int = 7) -> Bm25Index:
    """In parts of so many passages, merged so many postings at a time."""
    shares: list[float] = []
    with (
        mock.patch.object(bm25_builder, "POSTINGS_AT_A_TIME", at_a_time),
        mock.patch.object(bm25_builder, "_TERMS_AT_A_TIME", 3),
    ):
        firsts = range(0, len(corpus), part)
        for number, first in enumerate(firsts):
            write_part(folder, number, corpus[first : first + part], first, stop_words())
        merge_parts(folder, len(firsts), shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    return Bm25Index(folder, len(corpus))


@given(texts, st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join))
def test_scores_are_those_of_bm25s(corpus: list[str], query: str) -> None:
    tokens = [words_of(text, stop_words()) for text in corpus]
    if not any(tokens):
        return
    theirs = bm25s.BM25(k1=K1, b=B, method="lucene")
    theirs.index(tokens, show_progress=False)
    known = [word for word in words_of(query, stop_words()) if word in theirs.vocab_dict]
    wanted = theirs.get_scores(known) if known else np.zeros(len(corpus))
    with tempfile.TemporaryDirectory() as folder:
        [hits] = index_of(Path(folder), corpus).search([query], len(corpus))
    assert {hit.number for hit in hits} == set(np.flatnonzero(wanted).tolist())
    assert [hit.score for hit in hits] == pytest.approx([wanted[hit.number] for hit in hits], rel=1e-4)
    assert [(-hit.score, hit.number) for hit in hits] == sorted((-hit.score, hit.number) for hit in hits)


@given(texts.filter(lambda corpus: any(words_of(t, stop_words()) for t in corpus)), st.integers(1, 5))
def test_fewer_are_the_best_of_more(corpus: list[str], topk: int) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(bm25, "_BLOCK", 2):
        index = index_of(Path(folder), corpus)
        [some], [every] = (index.search(["amber castle salt"], k) for k in (topk, 100))
    assert some == every[:topk]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_words_are_known_whatever_their_case_and_others_find_nothing(folder: Path) -> None:
    index = index_of(folder, ["The ÉLAN of salt", "salt", "harbour"])
    [first, second, nothing, empty] = index.search(["élan", "SALT harbour", "the of x unknown", ""], 2)
    assert [hit.number for hit in first] == [0]
    assert {hit.number for hit in second} == {1, 2}
    assert nothing == empty == []


def test_a_corpus_without_a_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="BM25 has nothing to index"):
        index_of(tmp_path, ["the", "a b c"])
