"""A conversation between a policy and a user, and what a user reads of the policy's turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from verl_tool.formats.scan import remove_thoughts


@dataclass(frozen=True)
class SpokenMessage:
    """One message of a conversation."""

    by_user: bool
    """False: the policy wrote it."""
    text: str


@dataclass(frozen=True)
class Reply:
    """What a user answers."""

    text: str
    ends: bool = False
    """Whether the conversation ends with it."""


class SimulatedUser(Protocol):
    """Plays a user. It keeps nothing between calls: the conversation is all there is."""

    async def reply(self, conversation: Sequence[SpokenMessage]) -> Reply:
        """Answer the last message; the first message if there is none yet. Raises ToolFault."""


def readable(turn: str, max_characters: int) -> str:
    """Return what a user reads of a turn: its text without thoughts, at most so many characters.

    What chat templates and tokenizers take for the end of a message is broken up, so that a turn remains one message.
    """
    return _break_markers(remove_thoughts(turn).strip()[:max_characters])


_MARKERS = re.compile(r"<(?=[|｜/a-zA-Z])|\[(?=/?[A-Z_]{2,})")
"""Openings of control tokens such as ``<|im_end|>``, ``</s>``, ``<start_of_turn>`` and ``[INST]``."""


def _break_markers(text: str) -> str:
    return _MARKERS.sub(lambda opening: f"{opening[0]} ", text)


def without_breaks(text: str) -> str:
    """Return a text as it was before `readable` broke markers up, and one that has such spaces by itself without
    them: for comparisons, of which both sides are changed."""
    return _BREAKS.sub(lambda found: found[0][0], text)


_BREAKS = re.compile(r"[<\[] ")
