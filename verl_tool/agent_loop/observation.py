"""Prepare an observation for the model: make it safe to encode, and truncate it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence

from verl_tool.agent_loop.options import Side
from verl_tool.agent_loop.tokenizer import BROKEN_CHARACTER, Tokenizer
from verl_tool.agent_loop.trajectory import Author, Segment

TRUNCATION_MARK = "...(truncated)..."
"""Replaces the text that was dropped."""

MAX_CHARS_PER_TOKEN = 64
"""Text beyond this many characters per allowed token is dropped before encoding, so that huge outputs cost nothing."""

_PUNCTUATION = re.compile(r"[^\w\s]")
_INVISIBLE = frozenset({"Cc", "Cf", "Mn"})
"""Unicode categories of control characters, formatting characters and combining marks, which tokenizers may drop."""


class ControlTokens:
    """Keeps the control tokens of one tokenizer out of tool outputs."""

    def __init__(self, tokenizer: Tokenizer, allowed: Collection[str] = ()) -> None:
        """`allowed` tokens are left alone: markers of formats, which were already broken up when it was rendered."""
        texts = [text for text in tokenizer.special_tokens if text not in allowed]
        self._exactly, self._in_any_case = _first_characters(texts), _first_characters(texts, re.IGNORECASE)
        self._ids = frozenset(ids[0] for ids in map(tokenizer.encode, texts) if len(ids) == 1)

    def escaped_forms(self, output: str) -> Iterator[str]:
        """Yield `output` with its control tokens broken up: first changed as little as possible, then more and more.

        Some tokenizers normalise text before they match tokens (case, compatibility and invisible characters), and the
        text around an output may complete a token. Check with `forged` whether a form is safe.
        """
        yield _break_up(without_surrogates(output), self._exactly)
        folded = _break_up(_fold(without_surrogates(output)), self._in_any_case)
        yield f" {folded} "
        yield f" {_PUNCTUATION.sub(' ', folded)} "

    def forged(self, segments: Iterable[Segment]) -> bool:
        """Return whether the tool's tokens contain a control token."""
        return any(not self._ids.isdisjoint(s.tokens) for s in segments if s.author is Author.TOOL)


def without_surrogates(text: str) -> str:
    """Replace each lone surrogate, which no tokenizer accepts, by a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def truncate(text: str, limit: int, side: Side, tokenizer: Tokenizer) -> str:
    """Truncate `text` to `limit` tokens, with `TRUNCATION_MARK` in place of the dropped `side`.

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
        shortened = _shorten(head, tail, keep, side, tokenizer)
        excess = len(tokenizer.encode(shortened)) - limit
        if excess <= 0:
            return shortened
        keep -= excess
    return ""


def _shorten(head: list[int], tail: list[int], keep: int, side: Side, tokenizer: Tokenizer) -> str:
    """Join the mark and `keep` tokens of the text."""
    n_head = {"left": 0, "right": keep, "middle": keep - keep // 2}[side]
    n_tail = keep - n_head
    before = tokenizer.decode(head[:n_head]).rstrip(BROKEN_CHARACTER)
    after = tokenizer.decode(tail[len(tail) - n_tail :]).lstrip(BROKEN_CHARACTER)
    return before + TRUNCATION_MARK + after


def _fold(text: str) -> str:
    """Normalise `text` as a tokenizer may: plain forms of characters, without invisible ones and accents."""
    stored = (
        c for c in unicodedata.normalize("NFKD", text) if c.isspace() or unicodedata.category(c) not in _INVISIBLE
    )
    return unicodedata.normalize("NFKC", "".join(stored))


def _first_characters(tokens: Sequence[str], flags: int = 0) -> re.Pattern[str]:
    """Compile a pattern for the first character of each token, overlapping tokens included; grouped for speed."""
    rests: dict[str, list[str]] = {}
    for token in tokens:
        rests.setdefault(re.escape(token[0]), []).append(re.escape(token[1:]))
    groups = [f"{first}(?={'|'.join(rest)})" for first, rest in rests.items()]
    return re.compile("|".join(groups) or r"(?!)", flags)


def _break_up(text: str, first: re.Pattern[str]) -> str:
    """Insert a space after each match of `first`."""
    # Most outputs contain no match, and a search costs a tenth of a substitution.
    return first.sub(r"\g<0> ", text) if first.search(text) else text
