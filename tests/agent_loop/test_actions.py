"""The formats of the loop, against what a server with the same tools takes for a call."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tool.agent_loop.actions import LoopFormats, written_call
from verl_tool.formats import ALL_FORMATS, HERMES, Call
from verl_tool.formats.tags import OwnTagFormat
from verl_tool.servers.execution.calls import CallFinder
from verl_tool.servers.tools import load_tools
from verl_tool.servers.tools.base import Context, Tool, ToolResult


class Thinker(Tool):
    """Has the name of a thought's tag."""

    name = "think"
    aliases = ("ponder",)
    description = "Thinks."

    async def run(self, call: Call, context: Context) -> ToolResult:
        return ToolResult(call.input)


COUNTER = str(Path(__file__).parents[1] / "servers/data/counter.py")
TOOLS = (*load_tools("calculator,finish," + COUNTER), Thinker())
NAMES = tuple(tool.name for tool in TOOLS)
SERVER = CallFinder(TOOLS)
LOOP = LoopFormats(None, [tool.describe() for tool in TOOLS])
PIECES = (
    *("<calculator>", "</calculator>", "<calc>", "</calc>", "<CALCULATOR>", "</CALCULATOR>", "<finish/>", "<counter>"),
    *(
        "</counter>",
        "<ponder>",
        "</ponder>",
        "<think>",
        "</think>",
        "<result>",
        "</result>",
        "```",
        "\n",
        "1+1",
        " so ",
    ),
    *('<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>', "<tool>1</tool>"),
)
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
lists = st.none() | st.sets(st.sampled_from(NAMES)).map(sorted)


@given(texts, lists)
def test_the_loop_finds_a_call_wherever_the_server_runs_one(text: str, listed: list[str] | None) -> None:
    only = None if listed is None else [tool for tool in TOOLS if tool.name in listed]
    runs, _ = SERVER.find(text, only)
    if runs:
        assert written_call(text, LOOP.of(listed)) == text


@given(texts, lists)
def test_a_tag_of_a_tool_is_a_call_only_if_the_server_runs_something(text: str, listed: list[str] | None) -> None:
    own = [fmt for fmt in LOOP.of(listed) if isinstance(fmt, OwnTagFormat)]
    if written_call(text, own) is not None:
        only = None if listed is None else [tool for tool in TOOLS if tool.name in listed]
        assert SERVER.find(text, only)[0]


@given(lists)
def test_a_row_that_lists_tools_has_the_formats_of_a_server_with_those_alone(listed: list[str] | None) -> None:
    there = [tool.describe() for tool in TOOLS if listed is None or tool.name in listed]
    assert LOOP.of(listed) == LoopFormats(None, there).all


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("<calculator>1+1</calculator>", True),
        ("<CALCULATOR>1+1</CALCULATOR>", False),
        ("<think>I could write <calculator>1+1</calculator>.</think>\n2", False),
        ("I could write <calculator>1+1</calculator>.</think>\n2", False),
        ("<think>I add</think><calculator>1+1</calculator>", True),
        ("<think>so <calculator>1+1</calculator>", True),
        ("<result>\n<calculator>1+1</calculator>\n</result>", False),
        ("<counter></counter>", False),
        ("<reverse>abc</reverse>", False),
    ],
)
def test_a_turn_of_a_row_that_lists_the_calculator(text: str, called: bool) -> None:
    assert (written_call(text, LOOP.of(["calculator"])) == text) is called


def test_formats_that_are_named_are_those_of_every_row() -> None:
    named = LoopFormats(("hermes",), [tool.describe() for tool in TOOLS])
    assert named.all == named.of(["calculator"]) == (HERMES,)
    unknown = LoopFormats(None)
    assert unknown.all == unknown.of(["calculator"]) == ALL_FORMATS
