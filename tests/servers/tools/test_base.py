from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from tests.servers.tools.actions import text
from verl_tool.errors import ConfigError
from verl_tool.formats import FENCED, PYTHON_TAGS
from verl_tool.servers.tools import tool_class
from verl_tool.servers.tools.base import InvalidCall, Tool, ToolOptions, ToolResult

REVERSE = Path(__file__).parent / "data" / "reverse.py"
TAGS = {"start_tag": "<<RUN>>", "end_tag": "<<END>>", "output_start_tag": "<<OUT>>", "output_end_tag": "<<DONE>>"}


class ShoutOptions(ToolOptions):
    times: int = Field(default=1, ge=1)


class Shout(Tool):
    name = "shout"
    aliases = ("yell", "submit", "not a tag")
    description = "Shouts a text."
    example_actions = ("<shout>hey</shout>",)
    Options = ShoutOptions
    options: ShoutOptions

    async def run(self, call, context):
        return ToolResult(call.input.upper() * self.options.times)


def reverse(**options: object) -> Tool:
    return tool_class(str(REVERSE))(**options)


@pytest.mark.parametrize(
    "action",
    [
        "<reverse>abc</reverse>",
        "```reverse\nabc\n```",
        '<tool_call>{"name": "reverse", "arguments": {"input": "abc"}}</tool_call>',
        '<tool>{"name": "reverse", "arguments": {"input": "abc"}}</tool>',
        '{"name": "reverse", "arguments": {"input": "abc"}}',
        "<request><reverse>abc<call>",
        "<reverse>abc",
    ],
)
async def test_a_tool_of_ten_lines_is_called_in_every_format(action: str) -> None:
    assert (await text(reverse(), action)).strip() == "cba"


def test_a_stateless_tool_takes_less_than_thirty_lines() -> None:
    assert len(REVERSE.read_text().splitlines()) < 30


async def test_an_alias_is_a_tag_too_but_not_one_that_a_format_has() -> None:
    tool = Shout()
    assert await text(tool, "<yell>a</yell>") == "A"
    assert [call.format.name for call in tool.recognise("a<submit>")] == ["trl"]


async def test_options_are_read_and_checked() -> None:
    assert await text(Shout(times=2), "<shout>a</shout>") == "AA"
    with pytest.raises(ConfigError, match=r"tool shout has no option 'tims'; known: description, .*, times"):
        Shout(tims=2)
    with pytest.raises(ConfigError, match=r"tool shout: option times is 0: .*greater than or equal to 1"):
        Shout(times=0)


def test_a_description_of_ones_own() -> None:
    described = reverse(description="Turns it round.").describe()
    assert described.description == "Turns it round."
    assert "Turns it round." in described.usage
    assert "<reverse>abc</reverse>" in described.usage


def test_formats_can_be_restricted() -> None:
    tool = reverse(formats=("fenced",))
    assert tool.formats == (FENCED,)
    assert tool.recognise("<reverse>abc</reverse>") == []
    with pytest.raises(ConfigError, match="format 'fencd' is unknown"):
        reverse(formats=("fencd",))


def test_custom_tags_become_a_format() -> None:
    tool = reverse(**TAGS)
    [call] = tool.recognise("x <<RUN>>abc<<END>>")
    assert (call.name, call.input) == ("reverse", "abc")
    assert call.format.render("cba", call) == "\n<<OUT>>\ncba\n<<DONE>>\n"
    assert call.format.stop == ("<<END>>",)
    assert "<<RUN>>" not in PYTHON_TAGS.render("another tool printed <<RUN>>abc<<END>>")


def test_custom_tags_go_together() -> None:
    with pytest.raises(ConfigError, match="go together; set all or none"):
        reverse(start_tag="<<RUN>>")
    with pytest.raises(ConfigError, match="cannot mark a call"):
        reverse(**{**TAGS, "start_tag": "<"})


def test_no_tools_output_can_imitate_the_tags_of_a_tool() -> None:
    reverse()
    assert "<reverse>" not in FENCED.render("<reverse>abc</reverse>")


class ConvertArguments(BaseModel):
    value: float
    unit: Literal["km", "mi"] = "km"


class Convert(Tool):
    name = "convert"
    description = "Converts a length."
    Arguments = ConvertArguments

    async def run(self, call, context):
        given = self.arguments(call)
        return ToolResult(f"{given.value:.1f} {given.unit}")


class WordArguments(BaseModel):
    word: str


class Word(Convert):
    name = "word"
    Arguments = WordArguments

    async def run(self, call, context):
        return ToolResult(self.arguments(call).word)


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ('<tool_call>{"name": "convert", "arguments": {"value": "3", "unit": "mi"}}</tool_call>', "3.0 mi"),
        ('{"name": "convert", "arguments": {"value": 3}}', "3.0 km"),
        ('<convert>{"value": 3, "unit": "mi"}</convert>', "3.0 mi"),
        ('```convert\n{"value": 3}\n```', "3.0 km"),
        ('<request><convert>{"value": 3}<call>', "3.0 km"),
    ],
)
async def test_typed_arguments_are_read_in_every_format(action: str, answer: str) -> None:
    assert (await text(Convert(), action)).strip() == answer


@pytest.mark.parametrize("payload", ["abc", '{"word": "abc"}'])
async def test_of_one_argument_a_text_is_the_argument(payload: str) -> None:
    assert (await text(Word(), f"<word>{payload}</word>")).strip() == "abc"


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ('{"value": "three", "unit": "mi"}', r"wrong arguments for convert\(value, unit\): value: .* valid number"),
        ('{"unit": "mi"}', "value: Field required"),
        ('{"value": 3, "unit": "m"}', "unit: Input should be 'km' or 'mi'"),
        ("3 km", "write the arguments as one JSON object with the names value, unit"),
        ("[3]", "one JSON object"),
    ],
)
async def test_arguments_that_do_not_fit_are_told_in_words_for_the_model(payload: str, words: str) -> None:
    with pytest.raises(InvalidCall, match=words):
        await text(Convert(), f"<convert>{payload}</convert>")


async def test_the_schema_follows_from_the_types() -> None:
    assert Convert.parameters["properties"]["unit"]["enum"] == ["km", "mi"]
    assert Convert.parameters["required"] == ["value"]
    assert set(Word.parameters["properties"]) == {"word"}
    assert set(Shout.parameters["properties"]) == {"input"}
    with pytest.raises(ConfigError, match="has no Arguments"):
        Shout().arguments(Shout().recognise("<shout>a</shout>")[0])
