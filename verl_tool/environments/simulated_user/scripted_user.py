"""A user who follows a script of the row, for tests and small trainings: the same turn gets the same answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.environments.simulated_user.conversation import Reply, SpokenMessage, without_breaks


class Slot(BaseModel):
    """Something that the user knows, and says when it is asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: list[str] = Field(min_length=1)
    """Words or phrases, any of which asks for it. Letter case does not matter."""
    answer: str


class UserScript(BaseModel):
    """What the user says, and when."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first: str = Field(min_length=1)
    slots: list[Slot] = []
    otherwise: str = "I do not understand."
    """The answer to a turn that asks for no slot."""
    ends: list[str] = []
    """Words or phrases of the policy at which the conversation ends."""
    goodbye: str = ""


class ScriptedUser:
    """Plays a `UserScript`. A turn that asks for several slots gets all their answers, in the script's order."""

    def __init__(self, script: UserScript) -> None:
        self._script = script

    async def reply(self, conversation: Sequence[SpokenMessage]) -> Reply:
        if not conversation:
            return Reply(self._script.first)
        text = without_breaks(conversation[-1].text)
        answers = [slot.answer for slot in self._script.slots if _has_any_phrase(text, slot.about)]
        if answers:
            return Reply(" ".join(answers))
        if _has_any_phrase(text, self._script.ends):
            return Reply(self._script.goodbye, ends=True)
        return Reply(self._script.otherwise)


def _has_any_phrase(text: str, phrases: Sequence[str]) -> bool:
    """Return whether `text` has one of the phrases as whole words."""
    patterns = (rf"(?<!\w){re.escape(without_breaks(phrase))}(?!\w)" for phrase in phrases)
    return any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)
