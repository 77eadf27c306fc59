"""Characters that no observation holds."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.content.parts import TextPart
from verl_tool.formats import Call
from verl_tool.protocol import StepRequest
from verl_tool.servers.execution.clean_text import clean_text
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools.base import Context, InvalidCall, Tool, ToolResult

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_NASTY = "a\x00\x1b[31mb\x1b]0;t\x07\u202ec\x9b1m\x7f"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("\x1b[1;31mred\x1b[0m\t1\r\n", "red\t1\r\n"),
        ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x07", "link"),
        ("a\x00b\u202ec", "a\\x00b\\u202ec"),
        ("\x1b]0;without an end", "\\x1b]0;without an end"),
        (
            "caf\u00e9 \u05e9\u05dc\u05d5\u05dd \U0001f469\u200d\U0001f680",
            "caf\u00e9 \u05e9\u05dc\u05d5\u05dd \U0001f469\u200d\U0001f680",
        ),
    ],
)
def test_sequences_are_left_out_and_other_characters_written(text: str, clean: str) -> None:
    assert clean_text(text) == clean


@given(st.text(st.sampled_from("\x00\x1b[]m0;?\\\x07\x9b\u202ea\n"), max_size=60))
def test_nothing_forbidden_is_left(text: str) -> None:
    assert not _FORBIDDEN.search(clean_text(text))


@pytest.mark.parametrize("text", ["\x1b", "\x1b[", "\x1b]", "\x1b]a", "\x1b[1;", "\x1b\x1b[", "\x1b   ", "\u202e"])
def test_time_is_linear(text: str) -> None:
    began = time.process_time()
    clean_text(text * (200_000 // len(text)))
    assert time.process_time() - began < 2.0


class Mirror(Tool):
    """Answers what it is told, in one of several ways."""

    name = "mirror"
    description = "Answers."
    example_actions = ("<mirror>text</mirror>",)

    async def run(self, call: Call, context: Context) -> ToolResult:
        if call.input == "parts":
            return ToolResult(parts=["x", TextPart(_NASTY)])
        if call.input == "invalid":
            raise InvalidCall(_NASTY)
        return ToolResult(_NASTY, error=call.input == "error")


@pytest.mark.parametrize("action", ["text", "parts", "error", "invalid", "done</mirror><mirror>parts"])
async def test_the_observation_of_every_tool_is_clean(action: str) -> None:
    tools = ToolSet([Mirror()])
    await tools.start()
    (result,) = await tools.step([StepRequest("t", f"<mirror>{action}</mirror>", None)])
    await tools.close()
    assert result.fault is None
    assert "b" in result.observation
    assert not _FORBIDDEN.search(result.observation)


async def test_a_call_of_an_unknown_tool_is_answered_cleanly() -> None:
    tools = ToolSet([Mirror()])
    await tools.start()
    (result,) = await tools.step([StepRequest("t", '<tool_call>{"name": "\\u001b[1m\\u202e"}</tool_call>', None)])
    await tools.close()
    assert not _FORBIDDEN.search(result.observation)
