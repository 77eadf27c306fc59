"""Shows an image rotated."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from verl_tool.content.parts import LIMITS, ImagePart
from verl_tool.servers.tools.base import CallError
from verl_tool.servers.tools.pictures.picture_tools import PictureTools
from verl_tool.servers.tools.typed.function_tool import tool

if TYPE_CHECKING:
    from PIL.Image import Image


class Rotate(PictureTools):
    """A trajectory's images, rotated."""

    @tool(
        example_actions=(
            '<tool_call>\n{"name": "rotate", "arguments": {"angle": 90, "target_image": 1}}\n</tool_call>',
        )
    )
    def rotate(self, angle: float, target_image: int = 1) -> list[str | ImagePart]:
        """Rotate an image clockwise.

        Args:
            angle: Degrees.
            target_image: Number of the image, counted from 1 over all images so far.
        """
        width, height = self.view(target_image).full
        turn = math.radians(angle % 360)
        cos, sin = abs(math.cos(turn)), abs(math.sin(turn))
        pixels = (width * cos + height * sin) * (width * sin + height * cos)
        if pixels > LIMITS.image_pixels:
            raise CallError(
                f"image {target_image}, rotated, would have {pixels:.0f} pixels, and at most {LIMITS.image_pixels} are "
                "possible; zoom in on a part of it first, or rotate it by a multiple of 90 degrees"
            )
        picture = self.picture(target_image, partial(_rotated, angle=angle))
        return self.describe_picture(f"Here is the image, rotated by {angle:g} degrees.", picture)


def _rotated(image: Image, angle: float) -> Image:
    """Clockwise, on a canvas that holds all of it; the corners are white."""
    from PIL.Image import Resampling

    return image.rotate(-angle % 360, Resampling.BICUBIC, expand=True, fillcolor=(255, 255, 255))
