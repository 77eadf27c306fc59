"""What an image of a trajectory shows: an original, and what was done to it.

Each step is taken again on the original's own pixels, so that a crop of a crop, of a rotated image or of one with marks
is as sharp as the original.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from verl_tool.content.parts import ImagePart, encode_image
from verl_tool.servers.tools.base import CallError
from verl_tool.servers.tools.pictures.boxes import Box, Size
from verl_tool.servers.tools.pictures.decoded import DECODED

if TYPE_CHECKING:
    from PIL.Image import Image

Step: TypeAlias = "Callable[[Image], Image]"
MAX_STEPS = 16
"""From an original to what is shown; each is taken anew for every image that follows."""
JPEG_QUALITY = 85
"""Of what is shown of a JPEG: 1 dB below a quality of 90, in three quarters of its bytes."""
_PLACES = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
"""Images that are worked on at once: further ones would only take memory."""


@dataclass(frozen=True)
class Crop:
    box: Box

    def __call__(self, image: Image) -> Image:
        return image.crop(self.box)

    def within(self, outer: Crop) -> Crop:
        """The same crop, of what `outer` was taken of."""
        left, top = outer.box[:2]
        return Crop((self.box[0] + left, self.box[1] + top, self.box[2] + left, self.box[3] + top))


@dataclass(frozen=True)
class ImageView:
    original: ImagePart
    steps: tuple[Step, ...]
    full: Size
    """With all the original's pixels."""
    shown: Size
    """As the model sees it; it may be smaller than `full`."""

    @classmethod
    def of(cls, part: ImagePart) -> ImageView:
        """An image that comes from elsewhere."""
        return cls(part, (), (part.width, part.height), (part.width, part.height))

    def then(self, step: Step | None, max_pixels: int) -> tuple[ImageView, ImagePart]:
        """What the model sees after a further step, scaled down to `max_pixels`; None: the same image. Takes tens of
        milliseconds: call it in a thread. Raises ContentError if the original cannot be decoded, and CallError after
        too many steps."""
        steps = self.steps if step is None else _followed(self.steps, step)
        if not steps and self.original.width * self.original.height <= max_pixels:
            return self.of(self.original), self.original
        with _PLACES:
            image = DECODED.of(self.original)
            for each in steps:
                image = each(image)
            part = _encoded(image, self.original.media_type, max_pixels)
        return ImageView(self.original, steps, image.size, (part.width, part.height)), part


def _followed(steps: tuple[Step, ...], step: Step) -> tuple[Step, ...]:
    if steps and isinstance(step, Crop) and isinstance(steps[-1], Crop):
        return (*steps[:-1], step.within(steps[-1]))
    if len(steps) == MAX_STEPS:
        raise CallError(f"this image was changed {MAX_STEPS} times already; begin with an earlier one")
    return (*steps, step)


def _encoded(image: Image, media_type: str, max_pixels: int) -> ImagePart:
    """As a JPEG if the original is one, else without loss; without the original's comments and profiles."""
    image.info = {}
    if image.width * image.height > max_pixels:
        scale = (max_pixels / (image.width * image.height)) ** 0.5
        image = image.resize((max(1, int(image.width * scale)), max(1, int(image.height * scale))))
    if media_type == "image/jpeg":
        return encode_image(image, media_type, quality=JPEG_QUALITY)
    return encode_image(image, compress_level=1)
