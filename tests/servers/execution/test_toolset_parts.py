"""Results with images and audio: one observation with tags, the images beside it, within limits."""

from __future__ import annotations

import pytest
from test_toolset import fault_kind, one, running
from toy_tools import Puppet, picture

from verl_tool.content.parts import LIMITS, AudioPart, ImagePart, TextPart, parts_of, read_media, to_wire
from verl_tool.protocol import FaultKind, StepResult
from verl_tool.servers.tools import ToolResult, tool
from verl_tool.servers.tools.typed.function_tool import function_tool

SOUND = read_media(b"fLaC" + b"\0" * 20)


def shown(result: StepResult) -> list[TextPart | ImagePart | AudioPart]:
    return parts_of(result.observation, result.image, result.audio)


async def test_images_stand_where_the_tool_put_them() -> None:
    async with running([Puppet()]) as toolset:
        result = await one(
            toolset, "t", '<tool_call>{"name": "puppet", "arguments": {"input": "pictures 1 2"}}</tool_call>'
        )
        assert result.observation == "\n<tool_response>\nsee <image><image> above\n</tool_response>\n"
        assert result.image == [picture(1), picture(2)]
        assert result.audio is None


async def test_all_images_of_several_calls_stand() -> None:
    async with running([Puppet()]) as toolset:
        words = ("pictures 1", "say an <image>", f"image {to_wire(picture(2))}", "pictures 3")
        result = await one(toolset, "t", "".join(f"<puppet>{each}</puppet>" for each in words))
        assert result.image == [picture(n) for n in (1, 2, 3)]
        assert result.observation.count("<image>") == 3
        assert "an < image>" in result.observation, "a text cannot take the place of an image"
        kinds = [part.width if isinstance(part, ImagePart) else part.text for part in shown(result)]
        assert [kinds.index(4), len(kinds)] == [1, 7]


async def test_a_repeated_step_has_the_same_images_and_they_count_as_held() -> None:
    async with running([Puppet()]) as toolset:
        puppet = toolset.tools[0]
        first = await one(toolset, "t", "<puppet>pictures 1 2</puppet>", 0)
        assert (await one(toolset, "t", "<puppet>pictures 1 2</puppet>", 0)).image is first.image
        assert puppet.runs == ["pictures 1 2"]
        least = sum(len(picture(n).data) for n in (1, 2))
        plain = (await one(toolset, "u", "<puppet>say hi</puppet>", 0)).observation
        assert toolset._table.record_bytes > least + len(first.observation) + len(plain)


async def test_too_many_are_the_fault_of_that_trajectory() -> None:
    async with running([Puppet()]) as toolset:
        many = " ".join(["1"] * (LIMITS.media + 1))
        result = await one(toolset, "t", f"<puppet>pictures {many}</puppet>")
        assert fault_kind(result) is FaultKind.TOOL_CRASHED
        assert "65 images and audios in one observation; at most 64: give fewer" in result.fault.message
        mixed = await one(toolset, "t", "<puppet>pictures 1</puppet><puppet>image of a cat</puppet>")
        assert "'of a cat' is no data URI" in mixed.fault.message


async def test_a_typed_tool_returns_images_among_texts() -> None:
    @tool
    def look(twice: bool = False) -> object:
        """Look."""
        return ["left", picture(1), "right", picture(2)] if twice else picture(1)

    @tool
    async def listen() -> object:
        """Listen."""
        return (SOUND, "heard")

    @tool
    def broken() -> object:
        """Neither text nor image."""
        return [picture(1), 3]

    async with running([function_tool(each)() for each in (look, listen, broken)]) as toolset:
        assert (await one(toolset, "t", "<look/>")).image == [picture(1)]
        both = await one(toolset, "t", '<look>{"twice": true}</look>')
        assert "left<image>right<image>" in both.observation
        heard = await one(toolset, "t", "<listen/>")
        assert "<audio>heard" in heard.observation
        assert (heard.image, heard.audio) == (None, [SOUND])
        assert "a part is a int; give a text, an ImagePart" in (await one(toolset, "t", "<broken/>")).fault.message


def test_a_result_has_parts_or_a_text() -> None:
    assert ToolResult(parts=["a", SOUND]).parts == (TextPart("a"), SOUND)
    with pytest.raises(ValueError, match="put those among the parts"):
        ToolResult("a", parts=[SOUND])
