"""Measures distances and sizes on an image."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from verl_tool.servers.tools.base import CallError
from verl_tool.servers.tools.pictures.boxes import FourNumbers, TwoNumbers, in_pixels
from verl_tool.servers.tools.pictures.picture_tools import PictureTools
from verl_tool.servers.tools.typed.function_tool import tool


class Measure(PictureTools):
    """Lengths on a trajectory's images, in pixels of the original."""

    @tool(
        example_actions=(
            '<tool_call>\n{"name": "measure", "arguments": {"points": [[10, 20], [40, 60]], "target_image": 1}}'
            "\n</tool_call>",
            '<tool_call>\n{"name": "measure", "arguments": {"bbox_2d": [10, 20, 40, 60], "target_image": 1}}'
            "\n</tool_call>",
        )
    )
    def measure(
        self,
        points: Annotated[list[TwoNumbers], Field(max_length=100)] | None = None,
        bbox_2d: FourNumbers | None = None,
        target_image: int = 1,
    ) -> str:
        """Measure distances between points, or the size of a box or of the whole image, in pixels.

        Args:
            points: Two or more, each as [x, y] in pixels of the image or as fractions of its sides.
            bbox_2d: A box, as [x1, y1, x2, y2].
            target_image: Number of the image, counted from 1 over all images so far.
        """
        view = self.view(target_image)
        if points is not None and len(points) < 2:
            raise CallError("a distance needs two points; give points as [[x1, y1], [x2, y2]]")
        lines = []
        if bbox_2d is not None:
            left, top, right, bottom = self.box(target_image, bbox_2d)
            width, height = right - left, bottom - top
            lines.append(
                f"box: {width} x {height} pixels, area {width * height}, diagonal {math.hypot(width, height):.1f}"
            )
        if points is not None:
            values = in_pixels([v for point in points for v in point], view.shown, view.full, self.options.coordinates)
            placed = list(zip(values[::2], values[1::2], strict=True))
            for number, (one, other) in enumerate(pairwise(placed), 1):
                lines.append(
                    f"point {number} to point {number + 1}: {math.dist(one, other):.1f} pixels "
                    f"({abs(other[0] - one[0]):.1f} across, {abs(other[1] - one[1]):.1f} down)"
                )
        return "\n".join(lines or [f"image {target_image}: {view.full[0]} x {view.full[1]} pixels"])
