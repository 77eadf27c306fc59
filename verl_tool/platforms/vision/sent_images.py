"""Images on their way to vLLM. Written for verl 0.9.0 and 0.9.1.

verl sends the pixels of all images so far with every turn. Here an image's file lies in Ray's store once, the turns
name it, and the engine's process decodes it beside its event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import ray

from verl_tool.content.parts import ImagePart
from verl_tool.platforms.patch import verl_patch

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 128 << 20
"""Of decoded images that an engine's process keeps for later turns; three bytes each."""

_in_store: WeakKeyDictionary[ImagePart, ray.ObjectRef] = WeakKeyDictionary()
"""As long as a trajectory of this process has the image."""


@dataclass(frozen=True)
class PackedImage:
    """Names an image in Ray's store."""

    sha256: str
    part: ray.ObjectRef
    """Of the `ImagePart`."""


def send(image: ImagePart) -> PackedImage:
    """Put an image into Ray's store, unless it is there. Takes a copy of its bytes; Ray must be up."""
    reference = _in_store.get(image)
    if reference is None:
        reference = _in_store[image] = ray.put(image)
    return PackedImage(image.sha256, reference)


class DecodedBatch:
    """What has come, decoded, the latest `max_pixels` of it. Use it in one event loop."""

    def __init__(self, max_pixels: int = MAX_PIXELS) -> None:
        self._max_pixels, self._pixels = max_pixels, 0
        self._held: OrderedDict[str, Image] = OrderedDict()

    async def of(self, images: Sequence[Any]) -> list[Any]:
        """Images of Pillow in place of each `PackedImage`; anything else as it is. Raises ContentError for a file that
        cannot be decoded."""
        return [await self._one(image) if isinstance(image, PackedImage) else image for image in images]

    async def _one(self, sent: PackedImage) -> Image:
        if sent.sha256 not in self._held:
            part: ImagePart = await sent.part
            decoded = await asyncio.to_thread(part.decode)
            if sent.sha256 not in self._held:  # another turn may have been quicker
                self._held[sent.sha256] = decoded
                self._pixels += decoded.width * decoded.height
        image = self._held[sent.sha256]
        self._held.move_to_end(sent.sha256)
        while self._pixels > self._max_pixels:
            _, oldest = self._held.popitem(last=False)
            self._pixels -= oldest.width * oldest.height
        return image


def _taking_sent_images(server: type[Any]) -> type[Any]:
    generate: Callable[..., Any] = server.generate
    decoded = DecodedBatch()

    async def taking(self: Any, *args: Any, image_data: Sequence[Any] | None = None, **named: Any) -> Any:
        if image_data is not None:
            image_data = await decoded.of(image_data)
        return await generate(self, *args, image_data=image_data, **named)

    server.generate = taking
    return server


SENT_IMAGES = verl_patch(
    "workers.rollout.vllm_rollout.vllm_async_server",
    "vLLMHttpServer",
    why="the pixels of all images so far are sent with every turn",
    replace=_taking_sent_images,
)
