"""Find the calls of several formats in one action."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeVar

from verl_tool.formats.base import Call, Format
from verl_tool.formats.tags import Tag, TagFormat

T = TypeVar("T")


def find_calls(action: str, formats: Sequence[Format], names: Container[str] | None = None) -> list[Call]:
    """Find all calls, with one of `names` if given, in the order of the text. Of overlapping calls, the first one is
    returned. Of two calls with the same start, a well-formed one is preferred, then that of the first format."""
    found = [call for fmt in formats for call in fmt.find_calls(action) if names is None or call.name in names]
    return without_overlap(sorted(found, key=lambda call: (call.start, call.error is not None)), lambda call: call)


def without_overlap(found: Iterable[T], call_of: Callable[[T], Call]) -> list[T]:
    """Drop items of `found`, which are in the order of the text, whose calls begin inside an earlier one."""
    result: list[T] = []
    end = 0
    for one in found:
        call = call_of(one)
        if not result or call.start >= end:
            result.append(one)
            end = call.end
    return result


def calls_sent(action: str, formats: Sequence[Format]) -> list[Call]:
    """Find calls without knowing the server's tools: if no format finds a call, a tag at the end of the action counts
    as one, such as ``<reverse>abc</reverse>`` for the tool `reverse`."""
    return find_calls(action, formats) or last_tag(action)


def last_tag(action: str) -> list[Call]:
    """Return the call between ``<name>`` and ``</name>`` if the action ends with it, else an empty list."""
    _, closing, rest = action.rstrip().rpartition("</")
    name = rest.removesuffix(">")
    if not closing or name == rest or not Tag.can_be(name):
        return []
    calls = TagFormat("last_tag", [Tag.named(name)]).find_calls(action)
    return calls[-1:] if calls and not action[calls[-1].end :].strip() else []
