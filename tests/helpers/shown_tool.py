"""A tool that displays pictures for any text, for a model that was never trained to call it."""

from __future__ import annotations

import zlib

from PIL import Image

from verl_tool.content.parts import ImagePart, encode_image
from verl_tool.formats import Call
from verl_tool.formats.direct import DirectFormat
from verl_tool.servers.tools.base import Context, Tool, ToolResult


class _AnyText(DirectFormat):
    name = __file__

    def find_calls(self, text: str) -> list[Call]:
        return [Call("shown", text, 0, len(text), self)]


FORMAT = _AnyText()


class Shown(Tool):
    """Displays a picture for every other text, of a shape that depends on the text, and two for some."""

    name = "shown"
    description = "Shows pictures."
    example_actions = ("anything",)
    formats = (FORMAT,)

    async def run(self, call: Call, context: Context) -> ToolResult:
        seed = zlib.crc32(call.input.encode(errors="replace"))
        pictures = [striped(seed + n, height) for n, height in enumerate((40, 64, 128)[seed % 4 :])]
        return ToolResult(parts=["seen: ", *pictures[:2], "\n"])


def striped(seed: int, height: int = 64) -> ImagePart:
    """Make a picture of a few stripes. [height, 96]"""
    image = Image.new("RGB", (96, height))
    for x in range(0, 96, 8):
        image.paste(((seed * 37 + x * 5) % 256, (seed * 11 + x) % 256, (seed + 3 * x) % 256), (x, 0, x + 8, height))
    return encode_image(image)
