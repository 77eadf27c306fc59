"""An observation on its way from the tool server to the model: made safe to encode, and cut to its length."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence

from verl_tool.agent_loop.options import Side
from verl_tool.agent_loop.tokenizer import BROKEN_CHARACTER, Tokenizer
from verl_tool.agent_loop.trajectory import Author, Segment

TRUNCATION_MARK = "...(truncated)..."
"""Stands where text was dropped."""

MAX_CHARS_PER_TOKEN = 64
"""Text beyond this many characters a token of the limit is dropped before it is encoded: megabytes cost nothing."""

_PUNCTUATION = re.compile(r"[^\w\s]")
_INVISIBLE = frozenset({"Cc", "Cf", "Mn"})
"""Unicode categories of control characters, formatting characters and combining marks, which tokenizers may drop."""


class ControlTokens:
    """The control tokens of one tokenizer, and how a tool's output is kept free of them."""

    def __init__(self, tokenizer: Tokenizer, allowed: Collection[str] = ()) -> None:
        """`allowed` are left as they are: marks of formats, which whoever rendered the output broke up already."""
        texts = [text for text in tokenizer.special_tokens if text not in allowed]
        self._exactly, self._in_any_case = _first_characters(texts), _first_characters(texts, re.IGNORECASE)
        self._ids = frozenset(ids[0] for ids in map(tokenizer.encode, texts) if len(ids) == 1)

    def escaped_forms(self, output: str) -> Iterator[str]:
        """`output` with its control tokens broken up, changed as little as can be at first, then more and more.

        Some tokenizers rewrite text before they look for tokens (case, compatibility characters, invisible ones), and
        the text around an output may complete a token. `forged` tells whether a form was safe.
        """
        yield _broken_up(without_surrogates(output), self._exactly)
        folded = _broken_up(_folded(without_surrogates(output)), self._in_any_case)
        yield f" {folded} "
        yield f" {_PUNCTUATION.sub(' ', folded)} "

    def forged(self, segments: Iterable[Segment]) -> bool:
        """Whether a control token stands among the tool's own tokens."""
        return any(not self._ids.isdisjoint(s.tokens) for s in segments if s.author is Author.TOOL)


def without_surrogates(text: str) -> str:
    """`text` with a question mark in place of each half of a character, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def truncate(text: str, limit: int, side: Side, tokenizer: Tokenizer) -> str:
    """`text`, or what is left of it with `TRUNCATION_MARK` where `side` was dropped: at most `limit` tokens.

    Characters are never split. If not even the mark fits, the result is empty.
    """
    chars = limit * MAX_CHARS_PER_TOKEN
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
    before = tokenizer.decode(head[:n_head]).rstrip(BROKEN_CHARACTER)
    after = tokenizer.decode(tail[len(tail) - n_tail :]).lstrip(BROKEN_CHARACTER)
    return before + TRUNCATION_MARK + after


def _folded(text: str) -> str:
    """`text` as a tokenizer may normalise it: plain forms of characters, no invisible ones and no accents."""
    stored = (
        c for c in unicodedata.normalize("NFKD", text) if c.isspace() or unicodedata.category(c) not in _INVISIBLE
    )
    return unicodedata.normalize("NFKC", "".join(stored))


def _first_characters(tokens: Sequence[str], flags: int = 0) -> re.Pattern[str]:
    """Matches the first character of each token, overlapping ones too; grouped by it to search fast."""
    rests: dict[str, list[str]] = {}
    for token in tokens:
        rests.setdefault(re.escape(token[0]), []).append(re.escape(token[1:]))
    groups = [f"{first}(?={'|'.join(rest)})" for first, rest in rests.items()]
    return re.compile("|".join(groups) or r"(?!)", flags)


def _broken_up(text: str, first: re.Pattern[str]) -> str:
    """`text` with a blank behind each match of `first`; one that holds no match comes back unchanged."""
    # Most outputs hold none, and a search costs a tenth of a substitution.
    return first.sub(r"\g<0> ", text) if first.search(text) else text
