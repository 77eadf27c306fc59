"""Draws boxes, points and lines on an image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from verl_tool.content.parts import ImagePart
from verl_tool.servers.tools.base import CallError
from verl_tool.servers.tools.pictures.boxes import FourNumbers, TwoNumbers, in_pixels
from verl_tool.servers.tools.pictures.picture_tools import PictureTools
from verl_tool.servers.tools.typed.function_tool import tool

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SHAPES = 20
"""Of each kind."""
Boxes: TypeAlias = Annotated[list[FourNumbers], Field(max_length=MAX_SHAPES)]
Points: TypeAlias = Annotated[list[TwoNumbers], Field(max_length=MAX_SHAPES)]


class Draw(PictureTools):
    """A trajectory's images with marks on them."""

    @tool(
        example_actions=(
            '<tool_call>\n{"name": "draw", "arguments": {"boxes": [[10, 20, 110, 120]], "points": [[60, 70]], '
            '"color": "red", "label": "here", "target_image": 1}}\n</tool_call>',
        )
    )
    def draw(
        self,
        boxes: Boxes | None = None,
        points: Points | None = None,
        lines: Boxes | None = None,
        color: Annotated[str, Field(max_length=32)] = "red",
        label: Annotated[str, Field(max_length=40)] = "",
        target_image: int = 1,
    ) -> list[str | ImagePart]:
        """Draw boxes, points and lines on an image.

        Args:
            boxes: Each as [x1, y1, x2, y2] in pixels of the image or as fractions of its sides.
            points: Each as [x, y].
            lines: Each as [x1, y1, x2, y2], from one point to another.
            color: Such as "red" or "#ff8800".
            label: A text beside each of them.
            target_image: Number of the image, counted from 1 over all images so far.
        """
        from PIL import ImageColor

        view = self.view(target_image)
        shapes = [*(boxes or ()), *(points or ()), *(lines or ())]
        if not shapes:
            raise CallError("there is nothing to draw; give boxes, points or lines")
        try:
            rgb = ImageColor.getrgb(color)[:3]
        except ValueError as error:
            raise CallError(f'{color!r} is no color; write a name such as "red", or "#ff8800"') from error
        # Together, because they decide together whether they are fractions.
        values = iter(
            in_pixels([v for shape in shapes for v in shape], view.shown, view.full, self.options.coordinates)
        )
        placed = [[next(values) for _ in shape] for shape in shapes]
        if not all(0 <= v <= view.full[n % 2] for shape in placed for n, v in enumerate(shape)):
            width, height = view.shown
            raise CallError(f"a shape reaches beyond image {target_image}, which is {width} x {height} pixels")
        marks = partial(_marked, shapes=placed, boxes=len(boxes or ()), rgb=rgb, label=label)
        return self.describe_picture("Here is the image with what you drew.", self.picture(target_image, marks))


def _marked(image: Image, shapes: Sequence[Sequence[float]], boxes: int, rgb: tuple[int, ...], label: str) -> Image:
    """A copy with the shapes: first so many boxes, then points and lines."""
    from PIL import ImageDraw

    image = image.copy()
    pen = ImageDraw.Draw(image)
    width = max(2, max(image.size) // 300)
    for number, shape in enumerate(shapes):
        x, y = shape[:2]
        if len(shape) == 2:
            pen.ellipse((x - 2 * width, y - 2 * width, x + 2 * width, y + 2 * width), fill=rgb)
        elif number < boxes:
            pen.rectangle(
                (min(x, shape[2]), min(y, shape[3]), max(x, shape[2]), max(y, shape[3])), outline=rgb, width=width
            )
        else:
            pen.line(tuple(shape), fill=rgb, width=width)
        if label:
            pen.text((x + 3 * width, y + 3 * width), label, fill=rgb, font_size=min(48, max(12, max(image.size) // 40)))
    return image
