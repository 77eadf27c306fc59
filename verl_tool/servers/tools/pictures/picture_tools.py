"""Tools that look at a trajectory's images: those of its prompt, and all that its tools have shown since."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from verl_tool.content.parts import ImagePart, MediaPart, from_wire, listed
from verl_tool.errors import ContentError, ToolFault
from verl_tool.protocol import IMAGES_FIELD, FaultKind
from verl_tool.servers.tools.base import CallError, Context, ToolOptions
from verl_tool.servers.tools.pictures.boxes import Box, Coordinates, box_in_pixels
from verl_tool.servers.tools.pictures.views import ImageView, Step
from verl_tool.servers.tools.typed.trajectory_tools import TrajectoryTools


class PictureOptions(ToolOptions):
    max_pixels: int = Field(1 << 20, ge=1024, le=4 << 20)
    """Of an image that is shown; a larger one is scaled down, and has all its pixels again in the next crop."""
    min_side: int = Field(8, ge=1)
    """Pixels of the shorter side of a crop, in the original."""
    coordinates: Coordinates = "auto"
    """What the model's numbers are; ``thousandths`` for Qwen3-VL."""


class PictureTools(TrajectoryTools):
    """Tools that extend it share one instance in each trajectory, whichever of them are served.

    Images are counted from 1: those of the prompt, then those of observations.
    """

    takes_media = (ImagePart,)
    Options: ClassVar[type[ToolOptions]] = PictureOptions
    options: PictureOptions

    @classmethod
    def shared(cls) -> type[TrajectoryTools]:
        return PictureTools

    async def setup(self, trajectory: Context) -> None:
        self._made: dict[str, ImageView] = {}
        """By the hash of what the model sees."""
        self._views = await asyncio.to_thread(_views_of, trajectory.extra.get(IMAGES_FIELD))

    async def fork(self) -> PictureTools:
        copy = PictureTools()
        copy._made, copy._views = dict(self._made), list(self._views)
        return copy

    def take_media(self, media: Sequence[MediaPart]) -> None:
        images = (part for part in media if isinstance(part, ImagePart))
        self._views += [self._made.get(image.sha256) or ImageView.of(image) for image in images]

    @property
    def count(self) -> int:
        """Images that the model has seen."""
        return len(self._views)

    def view(self, number: int) -> ImageView:
        """The image of that number. Raises CallError."""
        if not self._views:
            raise CallError("there is no image yet: neither the prompt nor an observation has one")
        if not 1 <= number <= self.count:
            raise CallError(f"there is no image {number}; images are counted from 1, and there are {self.count}")
        return self._views[number - 1]

    def box(self, number: int, values: Sequence[float], least: int = 1) -> Box:
        """Pixels of the image of that number. Raises CallError."""
        view = self.view(number)
        return box_in_pixels(values, view.shown, view.full, self.options.coordinates, least)

    def picture(self, number: int, step: Step | None) -> ImagePart:
        """What an image shows after a step. Raises CallError."""
        try:
            view, part = self.view(number).then(step, self.options.max_pixels)
        except ContentError as error:
            raise CallError(f"image {number} cannot be shown: {error}") from error
        self._made[part.sha256] = view
        return part

    def describe_picture(self, what: str, part: ImagePart) -> list[str | ImagePart]:
        """An image behind a line that tells its number and size."""
        return [f"{what} (Image {self.count + 1}, Image Size: {part.width}x{part.height})\n", part]


def _views_of(images: object) -> list[ImageView]:
    """The images of a prompt. Raises ToolFault, of a kind that no policy can bring about."""
    try:
        parts = [from_wire(each) if isinstance(each, str) else each for each in listed(images)]
    except ContentError as error:
        raise ToolFault(FaultKind.MISCONFIGURED, f"{IMAGES_FIELD}: {error}", retryable=False) from error
    for part in parts:
        if not isinstance(part, ImagePart):
            message = (
                f"{IMAGES_FIELD} holds a {getattr(part, 'media_type', type(part).__name__)}; send data URIs of images"
            )
            raise ToolFault(FaultKind.MISCONFIGURED, message, retryable=False)
    return [ImageView.of(part) for part in parts if isinstance(part, ImagePart)]
