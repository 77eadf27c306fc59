"""The strings that mean something in a format, and how an observation is kept free of them.

A tool's output is untrusted text: a web page may hold ``<python>…</python>`` and a program may print a fence. Each
format claims its own strings here; `escape_markers` puts a blank behind the first character of every claimed string
that stands in an output, so that neither the model nor a parser can take it for a call or for the observation's end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

FENCE = "```"
_CHAT_TOKEN = r"<(?=[|｜][^|｜<>\s]{1,40}[|｜]>)"
"""Control tokens of chat templates, such as ``<|im_end|>``: a tool's output must not end the turn."""

_claimed: set[str] = {FENCE}
_compiled: re.Pattern[str] | None = None
"""Of the strings that are claimed by now; None: to be made."""


def claim(*strings: str) -> None:
    """Have these strings broken up in every observation of this process.

    A tool claims the tags that call it when it is made, a user's format those of its own syntax when it is loaded.
    Raises ValueError for a string that is too short to tell from ordinary text, or that a blank would not break up.
    """
    for string in strings:
        if len(string) < 3 or string != string.strip() or string[1].isspace():
            raise ValueError(f"{string!r} cannot mark a call: use at least 3 characters, the first two not white space")
    global _compiled
    _claimed.update(strings)
    _compiled = None


def escape_markers(output: str) -> str:
    """`output` with every claimed string broken up; a text that holds none comes back unchanged."""
    pattern = _pattern()
    # Most outputs hold none, and a search costs a tenth of a substitution.
    return pattern.sub(r"\g<0> ", output) if pattern.search(output) else output


def contains_marker(text: str, start: int) -> bool:
    """Whether a claimed string stands in `text` at or behind `start`."""
    return _pattern().search(text, start) is not None


def any_of(strings: Mapping[str, str]) -> str:
    """A regular expression for the longest of `strings`, each followed by an expression of its own.

    They are told apart character by character, so that a text of openings costs the same however many there are.
    """
    rests: dict[str, dict[str, str]] = {}
    for string, behind in strings.items():
        if string:
            rests.setdefault(string[0], {})[string[1:]] = behind
    branches = [re.escape(first) + _grouped(any_of(rest)) for first, rest in sorted(rests.items())]
    return "|".join(branches if "" not in strings else [*branches, strings[""]])


def _grouped(expression: str) -> str:
    return f"(?:{expression})" if "|" in expression else expression


def _pattern() -> re.Pattern[str]:
    """Matches the first character of each claimed string, overlapping ones too; grouped by it to search fast."""
    global _compiled
    if _compiled is None:
        rests: dict[str, dict[str, str]] = {}
        for string in _claimed:
            rests.setdefault(string[0], {})[string[1:]] = ""
        groups = [f"{re.escape(first)}(?={any_of(rest)})" for first, rest in sorted(rests.items())]
        _compiled = re.compile("|".join([*groups, _CHAT_TOKEN]))
    return _compiled
