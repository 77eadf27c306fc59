"""An observation on its way from the tool server to the model: made safe to encode, and cut to its length."""

from __future__ import annotations

from verl_tool.agent_loop.options import Side
from verl_tool.agent_loop.tokenizer import Tokenizer

TRUNCATION_MARK = "...(truncated)..."
"""Stands where text was dropped."""

_MOST_CHARS_A_TOKEN = 64
"""Text beyond this many characters a token of the limit is dropped before it is encoded: megabytes cost nothing."""

_BROKEN_CHARACTER = "�"


def disarm(text: str, special_tokens: tuple[str, ...]) -> str:
    """`text` with a space behind the first character of every control token, and without lone surrogates.

    A tool's output can thus not close a turn or open one in another role's name.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    for token in special_tokens:
        if len(token) > 1:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def truncate(text: str, limit: int, side: Side, tokenizer: Tokenizer) -> str:
    """`text`, or what is left of it with `TRUNCATION_MARK` where `side` was dropped: at most `limit` tokens.

    Characters are never split. If not even the mark fits, the result is empty.
    """
    chars = limit * _MOST_CHARS_A_TOKEN
    if len(text) <= chars:
        ids = tokenizer.encode(text)
        if len(ids) <= limit:
            return text
        head, tail = ids, ids
    else:
        head, tail = tokenizer.encode(text[:chars]), tokenizer.encode(text[-chars:])
    keep = limit
    while keep >= 0:
        shortened = _keep(head, tail, keep, side, tokenizer)
        excess = len(tokenizer.encode(shortened)) - limit
        if excess <= 0:
            return shortened
        keep -= excess
    return ""


def _keep(head: list[int], tail: list[int], keep: int, side: Side, tokenizer: Tokenizer) -> str:
    """The mark with `keep` tokens of text beside it."""
    n_head = {"left": 0, "right": keep, "middle": keep - keep // 2}[side]
    n_tail = keep - n_head
    before = tokenizer.decode(head[:n_head]).rstrip(_BROKEN_CHARACTER)
    after = tokenizer.decode(tail[len(tail) - n_tail :]).lstrip(_BROKEN_CHARACTER)
    return before + TRUNCATION_MARK + after
