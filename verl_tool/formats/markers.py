"""Keep observations free of strings with a meaning in a format.

A tool's output is untrusted text: a web page may contain ``<python>…</python>``, and a program may print a fence. Each
format claims its strings here. `escape_markers` inserts a space after the first character of each claimed string in an
output, so that neither the model nor a parser can mistake it for a call or for the end of the observation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

FENCE = "```"
_CHAT_TOKEN = r"<(?=[|｜][^|｜<>\s]{1,40}[|｜]>)"
"""Control tokens of chat templates, such as ``<|im_end|>``. A tool's output must not end the turn."""

_claimed: set[str] = {FENCE}
_compiled: re.Pattern[str] | None = None
"""Pattern of the claimed strings; None if it must be compiled."""


def claim(*strings: str) -> None:
    """Break up these strings in all observations of this process.

    A tool claims its tags when it is created, and a user's format its strings when it is loaded. Raises ValueError for
    a string that is too short to tell from ordinary text, or that a space would not break up.
    """
    for string in strings:
        if len(string) < 3 or string != string.strip() or string[1].isspace():
            raise ValueError(f"{string!r} cannot mark a call: use at least 3 characters, the first two not white space")
    global _compiled
    _claimed.update(strings)
    _compiled = None


def escape_markers(output: str) -> str:
    """Break up all claimed strings in `output`."""
    pattern = _pattern()
    # Most outputs contain none, and a search costs a tenth of a substitution.
    return pattern.sub(r"\g<0> ", output) if pattern.search(output) else output


def contains_marker(text: str, start: int) -> bool:
    """Return whether `text` contains a claimed string at or after `start`."""
    return _pattern().search(text, start) is not None


def any_of(strings: Mapping[str, str]) -> str:
    """Return a regular expression for the longest of `strings` that matches, each followed by its own expression.

    It branches by character, so that the cost of a match does not depend on the number of strings.
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
    """Return a pattern for the first character of each claimed string, overlapping ones too, grouped for speed."""
    global _compiled
    if _compiled is None:
        rests: dict[str, dict[str, str]] = {}
        for string in _claimed:
            rests.setdefault(string[0], {})[string[1:]] = ""
        groups = [f"{re.escape(first)}(?={any_of(rest)})" for first, rest in sorted(rests.items())]
        _compiled = re.compile("|".join([*groups, _CHAT_TOKEN]))
    return _compiled
