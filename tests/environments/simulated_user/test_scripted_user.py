"""What a script answers, whatever of a turn may be taken for a control token."""

from __future__ import annotations

import pytest

from verl_tool.environments.simulated_user.conversation import SpokenMessage, readable
from verl_tool.environments.simulated_user.scripted_user import ScriptedUser, UserScript

SCRIPT = {
    "first": "Hello.",
    "slots": [{"about": ["<b>size"], "answer": "Large."}],
    "ends": ["[DONE]"],
    "goodbye": "Bye.",
}


@pytest.mark.parametrize(
    ("turn", "answer", "ends"),
    [
        ("Which <b>size</b>?", "Large.", False),
        ("It is sent. [DONE]", "Bye.", True),
        ("It is sent. [UNDONE]", "", False),
    ],
)
async def test_markers_in_phrases_are_found(turn: str, answer: str, ends: bool) -> None:
    user = ScriptedUser(UserScript.model_validate(SCRIPT))
    reply = await user.reply([SpokenMessage(False, readable(turn, 1000))])
    assert reply.ends is ends
    assert reply.text == (answer or user._script.otherwise)


async def test_the_first_message_is_the_script_s() -> None:
    assert (await ScriptedUser(UserScript.model_validate(SCRIPT)).reply([])).text == "Hello."
