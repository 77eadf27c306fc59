"""Where a model points to on an image, in pixels: boxes and points, given in pixels or in parts of its sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from verl_tool.servers.tools.base import CallError

Box: TypeAlias = "tuple[int, int, int, int]"
"""Left, top, right and bottom, in pixels; the last two are beyond the box."""
Size: TypeAlias = "tuple[int, int]"
"""Width and height, pixels."""
Coordinates: TypeAlias = Literal["auto", "pixels", "fractions", "thousandths"]
"""How a model counts along a side of an image. ``auto``: in fractions if no number is above 1, else in pixels."""
FourNumbers: TypeAlias = Annotated[list[float], Field(min_length=4, max_length=4)]
TwoNumbers: TypeAlias = Annotated[list[float], Field(min_length=2, max_length=2)]

MAX_LONGER = 100
"""Times that a crop's long side may be as long as its short one: processors of models refuse more than 200."""
_ROUNDING = 1e-6
"""Pixels; 0.3 of 10 pixels are 3, whatever the computer's fractions give."""


def in_pixels(values: Sequence[float], shown: Size, full: Size, coordinates: Coordinates) -> list[float]:
    """`values`, by turns along x and y of an image that the model sees with the size `shown`, in pixels of its `full`
    size."""
    if coordinates == "fractions" or (coordinates == "auto" and all(abs(value) <= 1 for value in values)):
        shown = (1, 1)
    elif coordinates == "thousandths":
        shown = (1000, 1000)
    return [value / shown[n % 2] * full[n % 2] for n, value in enumerate(values)]


def box_in_pixels(
    values: Sequence[float], shown: Size, full: Size, coordinates: Coordinates = "auto", least: int = 1
) -> Box:
    """The whole pixels that a box touches, cut at the edges of the image.

    `least`: pixels that each of its sides must have. Raises CallError that tells the model what is wrong and what it
    may write.
    """
    left, top, right, bottom = in_pixels(values, shown, full, coordinates)
    if not all(map(math.isfinite, values)):
        raise _rejection("holds a value that is no number", values, shown, coordinates, least)
    if left >= right or top >= bottom:
        raise _rejection("is empty, or its corners are in the wrong order", values, shown, coordinates, least)
    if right <= 0 or bottom <= 0 or left >= full[0] or top >= full[1]:
        raise _rejection("lies outside of the image", values, shown, coordinates, least)
    box = (
        math.floor(max(left, 0) + _ROUNDING),
        math.floor(max(top, 0) + _ROUNDING),
        math.ceil(min(right, full[0]) - _ROUNDING),
        math.ceil(min(bottom, full[1]) - _ROUNDING),
    )
    width, height = box[2] - box[0], box[3] - box[1]
    if width < min(least, full[0]) or height < min(least, full[1]):
        raise _rejection(f"has only {width} x {height} pixels of the original", values, shown, coordinates, least)
    if max(width, height) > MAX_LONGER * min(width, height):
        problem = f"is too thin: one side is more than {MAX_LONGER} times as long as the other"
        raise _rejection(problem, values, shown, coordinates, least)
    return box


def _rejection(problem: str, values: Sequence[float], shown: Size, coordinates: Coordinates, least: int) -> CallError:
    limits = {"fractions": (1, 1), "thousandths": (1000, 1000)}.get(coordinates, shown)
    unit = {"fractions": "fractions of its sides", "thousandths": "thousandths of its sides"}.get(coordinates, "pixels")
    otherwise = ", or all four as fractions from 0 to 1" if coordinates == "auto" else ""
    box = ", ".join(f"{value:.6g}" for value in values)
    return CallError(
        f"the box [{box}] {problem}. The image is {shown[0]} x {shown[1]} pixels; write [x1, y1, x2, y2] in {unit} "
        f"with 0 <= x1 < x2 <= {limits[0]} and 0 <= y1 < y2 <= {limits[1]}{otherwise}, and at least {least} "
        "pixels of the original a side"
    )
