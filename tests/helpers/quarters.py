"""Pictures whose quarters differ in colour, so that a crop can be checked pixel by pixel, and a caller of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from verl_tool.content.parts import ImagePart, TextPart, encode_image, parts_of, to_wire
from verl_tool.protocol import IMAGES_FIELD, StepRequest, StepResult
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tool_config import ToolConfig
from verl_tool.servers.tools import load_tools

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def quarters(width: int = 80, height: int = 60) -> Image.Image:
    """Make a picture: red and green above blue and white."""
    image = Image.new("RGB", (width, height), WHITE)
    image.paste(RED, (0, 0, width // 2, height // 2))
    image.paste(GREEN, (width // 2, 0, width, height // 2))
    image.paste(BLUE, (0, height // 2, width // 2, height))
    return image


def noise(width: int = 80, height: int = 60, seed: int = 0) -> Image.Image:
    """Make a picture in which no two places are alike."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def same(one: Image.Image, other: Image.Image) -> bool:
    """Compare pixel by pixel."""
    return one.size == other.size and one.convert("RGB").tobytes() == other.convert("RGB").tobytes()


class Looker:
    """One trajectory that calls tools on images."""

    def __init__(self, tools: str, images: Sequence[Image.Image] = (), **options: object) -> None:
        config = {"tools": [{"name": name, **options} for name in tools.split(",")]} if options else {}
        self.toolset = ToolSet(load_tools(tools, ToolConfig.parse(config)))
        self.images = [encode_image(image) for image in images]
        self.step = 0

    async def answer(self, action: str, trajectory: str = "t") -> StepResult:
        """Call a tool. The prompt's images are sent with the first call."""
        extra = {IMAGES_FIELD: [to_wire(image) for image in self.images]} if self.images and not self.step else {}
        [result] = await self.toolset.step([StepRequest(trajectory, action, self.step, extra=extra)])
        self.step += 1
        assert result.fault is None, result.fault
        return result

    async def call(self, name: str, trajectory: str = "t", **arguments: Any) -> tuple[str, list[Image.Image]]:
        """Return the text that the model reads and the images that it sees."""
        call = json.dumps({"name": name, "arguments": arguments})
        result = await self.answer(f"<tool_call>{call}</tool_call>", trajectory)
        assert result.valid or "Error: wrong arguments" in result.observation
        parts = parts_of(result.observation, result.image)
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        text = text.strip().removeprefix("<tool_response>").removesuffix("</tool_response>").strip()
        return text, [part.decode() for part in parts if isinstance(part, ImagePart)]

    async def image(self, name: str, **arguments: Any) -> Image.Image:
        """Return the one image of a call."""
        text, images = await self.call(name, **arguments)
        assert len(images) == 1, text
        return images[0]
