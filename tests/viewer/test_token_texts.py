"""Texts of single tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers")

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.errors import ConfigError
from verl_tool.viewer.token_texts import TokenTexts, token_texts


def byte_tokenizer():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


def decode(ids):
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_pieces_join_to_the_text(text):
    ids = TOKENIZER.encode(text).ids
    pieces = token_texts(decode, ids)
    assert len(pieces) == len(ids)
    if "\ufffd" not in text:
        assert "".join(pieces) == text


@given(st.lists(st.integers(0, 255), max_size=30))
def test_bytes_that_are_no_text_have_a_piece_each(ids):
    assert len(token_texts(decode, ids)) == len(ids)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        TokenTexts(tmp_path)
