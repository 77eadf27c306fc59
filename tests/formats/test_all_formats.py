"""What holds for every format."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.strategies import PIECES, plain, texts
from verl_tool.formats import ALL_FORMATS, Format
from verl_tool.formats.tags import SearchTagFormat
from verl_tool.protocol import ToolDescription
from verl_tool.servers.tools import tool_class
from verl_tool.servers.tools.base import Tool
from verl_tool.servers.tools.finish import FinishTool
from verl_tool.servers.tools.python_code import PythonCodeTool

TOOLS: tuple[Tool, ...] = (PythonCodeTool(), tool_class("calculator")(), FinishTool())
FORMATS: tuple[Format, ...] = tuple({id(f): f for f in (*ALL_FORMATS, *(f for t in TOOLS for f in t.formats))}.values())
"""The built-in formats and the tags of the tools' own names."""

formats = st.sampled_from(FORMATS)
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def calls_in(text: str) -> list[tuple[str, str, str]]:
    return [(fmt.name, call.name, call.input) for fmt in FORMATS for call in fmt.find_calls(text)]


@given(formats, texts)
def test_finding_is_total_ordered_and_without_overlap(fmt: Format, text: str) -> None:
    end = 0
    for call in fmt.find_calls(text):
        assert end <= call.start < call.end <= len(text)
        assert call.format is fmt
        end = call.end


@given(formats, texts)
def test_an_observation_holds_no_call(fmt: Format, output: str) -> None:
    assert calls_in(fmt.render(output)) == []


@given(formats, texts, texts)
def test_an_observation_of_a_found_call_holds_no_call(fmt: Format, action: str, output: str) -> None:
    for call in fmt.find_calls(action):
        assert calls_in(fmt.render(output, call)) == []


@given(formats, texts)
def test_an_observation_cannot_be_left(fmt: Format, output: str) -> None:
    """What closes an observation stands in it as often as in the empty one: the output cannot end it early."""
    empty, full = fmt.render(""), fmt.render(output)
    for mark in ("</result>", "</tool_response>", "</information>", "</PYTHON-OUTPUT>", "<response>", "```"):
        assert full.count(mark) == empty.count(mark)


@given(formats, plain)
def test_ordinary_text_is_rendered_unchanged(fmt: Format, output: str) -> None:
    if fmt.name == "json":
        return  # it is escaped as JSON demands: see test_bare_json.py
    # Search-R1 leaves out the blanks around what it found.
    assert (output.strip() if isinstance(fmt, SearchTagFormat) else output) in fmt.render(output)


@given(formats, plain.filter(lambda text: not any(mark in text for mark in '"\\{}')))
def test_text_without_marks_holds_no_call(fmt: Format, text: str) -> None:
    assert fmt.find_calls(text) == []


@pytest.mark.parametrize(
    "output", ["a < b and c > d", "x = `y`", "<html><b>bold</b></html>", "if a <b>c: pass", "1 <|> 2"]
)
def test_look_alikes_in_an_output_are_left_alone(output: str) -> None:
    assert all(output in fmt.render(output) for fmt in FORMATS)


@every_format
def test_chat_control_tokens_are_broken_up(fmt: Format) -> None:
    for token in ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>"):
        assert token not in fmt.render(f"a{token}b")


KINDS: tuple[Format, ...] = (*ALL_FORMATS, TOOLS[0].formats[-1])
"""One format of each way to read; all tags of names are read alike."""
NEAR_MISSES = (
    "<python>",
    "<tool_call>",
    '<tool_call>["',
    '<tool_call>{"name": "a", </tool_call>',
    "<request><T>",
    "<request><T>x<cal",
    "<finish/>",
    "<result>",
    "`",
    "```a\n",
    "```a\n``",
    "```a\nb```python",
    "````a\n```\n",
    "```a\nb```c ````d\n",
    " \t",
    '{"name": ',
)


@pytest.mark.parametrize("fmt", KINDS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("piece", NEAR_MISSES)
def test_searching_a_megabyte_of_near_misses_takes_no_quadratic_time(fmt: Format, piece: str) -> None:
    """A quadratic search would take minutes; the test's time limit is the assertion."""
    fmt.find_calls(piece * (1_000_000 // len(piece)))


@settings(max_examples=40)
@given(formats, st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join))
def test_no_repetition_takes_quadratic_time(fmt: Format, unit: str) -> None:
    fmt.find_calls(unit * (100_000 // len(unit)))


@pytest.mark.parametrize("piece", NEAR_MISSES)
def test_cleaning_a_megabyte_of_near_misses_takes_no_quadratic_time(piece: str) -> None:
    FORMATS[0].render(piece * (1_000_000 // len(piece)))


@every_format
def test_usage_names_the_tool_and_shows_a_call(fmt: Format) -> None:
    described = ToolDescription(
        name="reverse", description="Reverses a text.", parameters={}, usage="", example_actions=[]
    )
    usage = fmt.usage([described])
    assert "reverse" in usage
    assert "Reverses a text." in usage


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_tools_usage_holds_one_of_its_examples(tool: Tool) -> None:
    assert tool.example_actions[0] in tool.describe().usage


@every_format
def test_what_a_format_writes_it_finds_again(fmt: Format) -> None:
    [call] = fmt.find_calls(fmt.write("calculator", "1+1"))  # type: ignore[attr-defined]  # all of ours can write
    assert call.input.strip() == "1+1"
