"""Images that were decoded lately, held once in a process however many trajectories look at them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING

from verl_tool.content.parts import ImagePart

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 64 << 20
"""Of all that are held, at three bytes each; one image may have more by itself."""


class DecodedImages:
    """The images that were asked for last. Its methods are for threads."""

    def __init__(self, max_pixels: int = MAX_PIXELS) -> None:
        self._max_pixels = max_pixels
        self._lock = threading.Lock()
        self._held: OrderedDict[str, tuple[int, Future[Image]]] = OrderedDict()
        """By hash, the latest last: pixels, and the image as soon as it is decoded."""
        self.pixels = 0
        """Of all images that are held."""

    def of(self, part: ImagePart) -> Image:
        """The image in RGB; do not draw on it, others see it too. Raises ContentError if it cannot be decoded."""
        with self._lock:
            held = self._held.get(part.sha256)
            future = Future() if held is None else held[1]
            if held is None:
                self._held[part.sha256] = (part.width * part.height, future)
                self.pixels += part.width * part.height
            self._held.move_to_end(part.sha256)
            while self.pixels > self._max_pixels and len(self._held) > 1:
                self.pixels -= self._held.popitem(last=False)[1][0]
        if held is None:
            try:
                future.set_result(part.decode())
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()


DECODED = DecodedImages()
