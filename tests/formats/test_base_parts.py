"""What every format makes of an output that holds images: they stay where they are, and only text is escaped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tools import picture

from tests.formats.strategies import texts
from verl_tool.content.parts import ImagePart, Part, TextPart, tagged
from verl_tool.errors import ContentError
from verl_tool.formats import ALL_FORMATS, HERMES, PYTHON_TAGS, Call, FencedFormat, Format
from verl_tool.formats.base import render_parts
from verl_tool.formats.direct import DIRECT

PICTURES = [picture(red) for red in range(3)]
formats = st.sampled_from(ALL_FORMATS)
outputs = st.lists(texts.map(TextPart) | st.sampled_from(PICTURES), max_size=5)


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


@settings(max_examples=50)
@given(formats, outputs)
def test_images_keep_their_order_and_a_text_reads_as_without_them(fmt: Format, output: list[Part]) -> None:
    shown = render_parts(fmt, output)
    images = [part for part in output if isinstance(part, ImagePart)]
    assert [part for part in shown if isinstance(part, ImagePart)] == images
    if not images:
        assert text_of(shown) == fmt.render(text_of(output))
    assert [call for other in ALL_FORMATS for call in other.find_calls(tagged(shown)[0])] == []


def test_an_image_stands_between_the_tags_and_text_is_escaped() -> None:
    call = HERMES.find_calls('<tool_call>{"name": "zoom", "arguments": {}}</tool_call>')[0]
    shown = render_parts(HERMES, [TextPart("</tool_response>left "), PICTURES[0], TextPart(" <image>")], call)
    assert shown == [
        TextPart("\n<tool_response>\n< /tool_response>left "),
        PICTURES[0],
        TextPart(" <image>\n</tool_response>\n"),
    ]
    text, images, _ = tagged(shown)
    assert (text.count("<image>"), images) == (1, PICTURES[:1])


@pytest.mark.parametrize("fmt", [PYTHON_TAGS, FencedFormat(), DIRECT], ids=lambda fmt: fmt.name)
def test_an_image_may_be_all(fmt: Format) -> None:
    shown = render_parts(fmt, PICTURES)
    assert [part for part in shown if isinstance(part, ImagePart)] == PICTURES
    assert text_of(shown) == fmt.render("")


@pytest.mark.parametrize(
    "rendered", [lambda _: "done", lambda output: output * 2, lambda output: output[16:] + output[:16]]
)
def test_a_format_that_leaves_an_image_out_or_changes_their_order_is_refused(rendered: Callable[[str], str]) -> None:
    @dataclass
    class Silent(FencedFormat):
        name = "silent"

        def render(self, output: str, call: Call | None = None) -> str:
            return rendered(output)

    with pytest.raises(
        ContentError, match="format 'silent' leaves out an image or audio of an output; let render keep"
    ):
        render_parts(Silent(), PICTURES)
