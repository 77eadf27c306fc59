"""Where in a turn of the model an action is, if there is one."""

from __future__ import annotations

from collections.abc import Sequence

from verl_tool.formats import Format


def stopped_action(text: str, stops: Sequence[str]) -> str | None:
    """The turn up to the end of the first stop string, or None.

    The last token may hold text behind the stop string. It stays in the tokens, where the model wrote it, and is no
    part of the action.
    """
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else None


def written_call(text: str, formats: Sequence[Format]) -> str | None:
    """The whole turn if a format finds a call in it, or None. For turns that no stop string ends."""
    return text if any(fmt.find_calls(text) for fmt in formats) else None
