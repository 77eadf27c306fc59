"""A call in each format, made of what the tools tell."""

from __future__ import annotations

import pytest
from doctor_setups import TOOLS

from verl_tool.checks.example_call import example_of
from verl_tool.checks.setup import MADE_UP_TOOL
from verl_tool.formats import ALL_FORMATS, Format, format_by_name

CALCULATOR, PYTHON, FINISH = TOOLS


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("tool", [CALCULATOR, PYTHON, MADE_UP_TOOL], ids=lambda tool: tool.name)
def test_each_format_finds_the_call_that_is_made_in_it(fmt: Format, tool: object) -> None:
    example = example_of(fmt, [tool])  # type: ignore[list-item]
    assert example
    assert example.found
    assert example.format is fmt


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "deepseek", "glm", "kimi", "qwen3_coder", "harmony"])
def test_a_native_call_names_the_tool_and_its_arguments(name: str) -> None:
    [call] = example_of(format_by_name(name), [MADE_UP_TOOL]).found
    assert (call.name, call.error) == ("weather", None)
    assert {key: str(value) for key, value in (call.arguments or {}).items()} == {"city": "Oslo", "days": "1"}


def test_the_stop_string_stands_behind_a_call_that_it_does_not_close() -> None:
    fenced = format_by_name("fenced")
    assert example_of(fenced, [PYTHON], ["```output"]).text == "```python\nprint(1 + 1)\n```\n```output"
    assert example_of(fenced, [PYTHON]).text == "```python\nprint(1 + 1)\n```"
    assert example_of(format_by_name("hermes"), [PYTHON], ["</tool_call>"]).text.endswith("</tool_call>")


def test_a_tool_that_ends_the_trajectory_is_the_last_choice() -> None:
    assert example_of(format_by_name("hermes"), [FINISH, CALCULATOR]).tool == "calculator"
    assert example_of(format_by_name("hermes"), [FINISH]).tool == "finish"


def test_a_format_need_not_write_calls() -> None:
    class Silent:
        name, stop, observation = "silent", ("</silent>",), None

        def markers(self):
            return ("<silent>",)

        def find_calls(self, text):
            return []

        def render(self, output, call=None):
            return output

        def usage(self, tools):
            return "Be silent."

    assert example_of(Silent(), [CALCULATOR]) is None
