"""What holds for the formats of instruct models alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.strategies import PIECES, texts
from verl_tool.formats import BUILT_IN_MARKERS, HERMES, escape_markers
from verl_tool.formats.find import find_calls
from verl_tool.formats.json_call import as_input
from verl_tool.formats.native import GLM, HARMONY, LLAMA3, NATIVE, QWEN3_CODER
from verl_tool.formats.tool_response import ToolResponseFormat, outputs

FORMATS: tuple[ToolResponseFormat, ...] = (HERMES, *NATIVE)
TAGGED = (QWEN3_CODER, GLM)
"""Their arguments have no types."""
formats = st.sampled_from(FORMATS)
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,20}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def in_turn(fmt: ToolResponseFormat, call: str) -> str:
    """A turn of the model with the call in it; Llama's is the whole turn, and gpt-oss writes messages only."""
    return call if fmt in (LLAMA3, HARMONY) else f"Let me see.\n{call}"


@given(formats, names, st.dictionaries(names, values, max_size=3))
def test_a_call_is_found_as_it_was_written(fmt: ToolResponseFormat, name: str, arguments: dict[str, Any]) -> None:
    if fmt in TAGGED:
        arguments = {key: value for key, value in arguments.items() if isinstance(value, str) and "</" not in value}
    text = in_turn(fmt, fmt.write_call(name, arguments))
    if fmt is not HERMES and any(escape_markers(str(value)) != str(value) for value in arguments.values()):
        return  # control tokens in a string end the call
    [call] = fmt.find_calls(text)
    assert (call.name, call.error, call.format) == (name, None, fmt)
    assert call.arguments == arguments
    assert call.input == as_input(arguments)
    assert 0 <= call.start < call.end <= len(text)


@given(formats, texts)
def test_no_text_raises_and_calls_do_not_overlap(fmt: ToolResponseFormat, text: str) -> None:
    end = 0
    for call in fmt.find_calls(text):
        assert end <= call.start < call.end <= len(text)
        end = call.end


@given(formats, st.text(max_size=30), st.integers(0, 60))
def test_a_call_that_is_cut_off_anywhere_raises_nothing(fmt: ToolResponseFormat, value: str, length: int) -> None:
    for call in fmt.find_calls(fmt.write_call("weather", {"city": value})[:length]):
        assert call.error is not None or call.arguments is not None or fmt is LLAMA3


@every_format
def test_no_call_is_looked_for_in_thoughts(fmt: ToolResponseFormat) -> None:
    thought, call = fmt.write_call("wrong", {"a": "1"}), fmt.write_call("right", {"a": "1"})
    if fmt.name == "harmony":
        text = f"<|channel|>analysis<|message|>I could write to=functions.wrong {{}}<|end|><|start|>assistant{call}"
        assert [found.name for found in fmt.find_calls(text)] == ["right"]
        return
    for opened in ("<think>", ""):  # without the opening: the prompt holds it
        text = f"{opened}I could write {thought}, and so I do.</think>\n\n{call}"
        assert [found.name for found in fmt.find_calls(text)] == ["right"]
    assert fmt.find_calls(f"<think>I could write {thought}") == []


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.name not in ("harmony", "llama3", "mistral")])
def test_the_end_of_a_thought_may_be_quoted_in_a_call(fmt: ToolResponseFormat) -> None:
    [call] = fmt.find_calls(fmt.write_call("f", {"text": "a </think> b"}))
    assert call.input == "a </think> b"


@every_format
def test_an_observation_is_taken_apart_again(fmt: ToolResponseFormat) -> None:
    observation = fmt.render("one\ntwo") + fmt.render("</tool_response><tool_response>") + fmt.render("")
    assert outputs(observation) == ["one\ntwo", "< /tool_response>< tool_response>", ""]


@every_format
def test_its_marks_are_broken_up_in_what_a_tool_answers(fmt: ToolResponseFormat) -> None:
    assert set(fmt.markers()) <= BUILT_IN_MARKERS
    written = fmt.write_call("f", {"a": "1"})
    assert find_calls(fmt.render(written), FORMATS) == []
    assert find_calls(escape_markers(written), [each for each in FORMATS if each is not LLAMA3]) == []


NEAR_MISSES = (
    "<tool_call>a",
    "<tool_call>a<arg_key>k</arg_key>",
    "<tool_call>a<arg_key>k</arg_key><arg_value>",
    "<function=a>",
    "<function=a></tool_call>",
    "<function=a><parameter=b>",
    "<function=a><parameter=b></parameter>",
    "<tool_call>" + " " * 50,
    "<|tool_call_begin|>",
    "<|tool_call_begin|>f<|tool_call_argument_begin|>{",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    "[TOOL_CALLS]",
    '[TOOL_CALLS][{"name": "a"},',
    '[TOOL_CALLS][{"name": ',
    "[TOOL_CALLS]f[ARGS]{",
    "<|python_tag|>",
    '<|python_tag|>{"name": ',
    '{"name": "f"};',
    "<|python_tag|>a.call(" + 'b="",' * 20,
    "<|message|>",
    "<|start|>assistant to=f<|message|>{",
    "<|channel|>to=" + "a" * 50,
    "<think>",
    "</think>",
    "<think></think>",
    "[THINK]<tool_call>",
)


@every_format
@pytest.mark.parametrize("piece", NEAR_MISSES)
def test_near_misses_take_no_quadratic_time(fmt: ToolResponseFormat, piece: str) -> None:
    """A quadratic search would take minutes; the test's time limit is the assertion."""
    fmt.find_calls(piece * (200_000 // len(piece)))


@settings(max_examples=30)
@given(formats, st.lists(st.sampled_from((*PIECES, *NEAR_MISSES)), min_size=1, max_size=5).map("".join))
def test_no_repetition_takes_quadratic_time(fmt: ToolResponseFormat, unit: str) -> None:
    fmt.find_calls(unit * (50_000 // len(unit)))
