"""The calls of several formats in one action."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeVar

from verl_tool.formats.base import Call, Format
from verl_tool.formats.tags import Tag, TagFormat

T = TypeVar("T")


def find_calls(action: str, formats: Sequence[Format], names: Container[str] | None = None) -> list[Call]:
    """All calls (by one of `names`, if given) in the order of the text; of those that overlap the first one, and of two
    that begin at the same place one that is well formed, else that of the format which stands first."""
    found = [call for fmt in formats for call in fmt.find_calls(action) if names is None or call.name in names]
    return without_overlap(sorted(found, key=lambda call: (call.start, call.error is not None)), lambda call: call)


def without_overlap(found: Iterable[T], call_of: Callable[[T], Call]) -> list[T]:
    """`found`, in the order of the text, less those whose call begins inside one that is kept."""
    stored: list[T] = []
    end = 0
    for one in found:
        call = call_of(one)
        if not stored or call.start >= end:
            stored.append(one)
            end = call.end
    return stored


def calls_sent(action: str, formats: Sequence[Format]) -> list[Call]:
    """As `find_calls`, for those who do not know the tools of the server: if no format finds a call, the tag that the
    action ends with is one, such as ``<reverse>abc</reverse>``, which the tool `reverse` takes."""
    return find_calls(action, formats) or last_tag(action)


def last_tag(action: str) -> list[Call]:
    """The call between ``<name>`` and ``</name>``, if the action ends so; else none."""
    _, closing, rest = action.rstrip().rpartition("</")
    name = rest.removesuffix(">")
    if not closing or name == rest or not Tag.can_be(name):
        return []
    calls = TagFormat("last_tag", [Tag.named(name)]).find_calls(action)
    return calls[-1:] if calls and not action[calls[-1].end :].strip() else []
