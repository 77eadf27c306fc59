"""The strings that mean something in a dialect, and how an observation is kept free of them.

A tool's output is untrusted text: a web page may hold ``<python>…</python>`` and a program may print a fence. Each
dialect claims its own strings here; `neutralise` puts a blank behind the first character of every claimed string that
stands in an output, so that neither the model nor a parser can take it for a call or for the observation's end.
"""

from __future__ import annotations

import re
from functools import lru_cache

FENCE = "```"
_CHAT_TOKEN = r"<(?=[|｜][^|｜<>\s]{1,40}[|｜]>)"
"""Control tokens of chat templates, such as ``<|im_end|>``: a tool's output must not end the turn."""

_claimed: set[str] = {FENCE}


def claim(*strings: str) -> None:
    """Have these strings broken up in every observation of this process.

    A tool claims the tags that call it when it is made, a user's format those of its own syntax when it is loaded.
    Raises ValueError for a string that is too short to tell from ordinary text, or that a blank would not break up.
    """
    for string in strings:
        if len(string) < 3 or string != string.strip() or string[1].isspace():
            raise ValueError(f"{string!r} cannot mark a call: use at least 3 characters, the first two not white space")
    _claimed.update(strings)


def neutralise(output: str) -> str:
    """`output` with every claimed string broken up; a text that holds none comes back unchanged."""
    pattern = _pattern(frozenset(_claimed))
    # Most outputs hold none, and a search costs a tenth of a substitution.
    return pattern.sub(r"\g<0> ", output) if pattern.search(output) else output


def holds_marker(text: str, start: int) -> bool:
    """Whether a claimed string stands in `text` at or behind `start`."""
    return _pattern(frozenset(_claimed)).search(text, start) is not None


@lru_cache(maxsize=16)
def _pattern(strings: frozenset[str]) -> re.Pattern[str]:
    """Matches the first character of each claimed string, overlapping ones too; grouped by it to search fast."""
    rests: dict[str, list[str]] = {}
    for string in sorted(strings):
        rests.setdefault(string[0], []).append(re.escape(string[1:]))
    groups = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
    return re.compile("|".join([*groups, _CHAT_TOKEN]))
