"""Placeholders, tokens and features of images for Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

An image has one ``<|image_pad|>`` per feature, as transformers expects. vLLM expects one per image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ConfigError, ContentError

if TYPE_CHECKING:
    from PIL.Image import Image

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""``model_type`` of the supported models."""
VIDEO_PAD = "<|video_pad|>"


class QwenImageProcessor(Protocol):
    """The part of transformers' image processors that is used here. ``Qwen2VLImageProcessorPil`` implements it without
    torchvision."""

    patch_size: int
    merge_size: int
    size: Mapping[str, int]
    """Minimum and maximum number of pixels of an image: ``shortest_edge`` and ``longest_edge``."""

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, Any]) -> int: ...

    def __call__(self, images: Sequence[Image], *, return_tensors: str) -> Mapping[str, Any]: ...


class QwenImages:
    """`ImageTokens` of these models, and the inputs of a transformers model for images."""

    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"

    def __init__(self, processor: QwenImageProcessor, tokenizer: Tokenizer) -> None:
        """Raises ConfigError if the tokenizer lacks the image tokens."""
        ids = tokenizer.encode(self.placeholder)
        if len(ids) != 3:
            raise ConfigError(
                f"{self.placeholder!r} is {len(ids)} tokens in this tokenizer, and must be 3: the model is not one of "
                "Qwen2-VL, Qwen2.5-VL and Qwen3-VL; leave out the image processor"
            )
        self._begin, self.pad_id, self._end = ids
        self.processor = processor
        video = tokenizer.encode(VIDEO_PAD)
        self.banned_ids = (self.pad_id, *(video if len(video) == 1 else ()))
        """Tokens for parts of images and videos, which an engine must never sample. verl bans the same ones."""

    def of(self, image: ImagePart) -> list[int]:
        """Return the image's tokens. Raises ContentError if the model does not accept its aspect ratio."""
        try:
            patches = self.processor.get_number_of_image_patches(image.height, image.width, {})
        except ValueError as error:
            raise ContentError(f"an image of {image.width} x {image.height} pixels: {error}") from error
        return [self._begin, *[self.pad_id] * (patches // self.processor.merge_size**2), self._end]

    def grid(self, image: ImagePart) -> tuple[int, int, int]:
        """Return the frames, rows and columns of an image's patches: the model's argument ``image_grid_thw``. Requires
        transformers."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        patch, size = self.processor.patch_size, self.processor.size
        side = patch * self.processor.merge_size
        limits = (size["shortest_edge"], size["longest_edge"])
        height, width = smart_resize(image.height, image.width, side, *limits)
        return 1, height // patch, width // patch

    def one_each(self, ids: Sequence[int]) -> list[int]:
        """Reduce `ids` to one ``<|image_pad|>`` per image. vLLM inserts the others itself."""
        pad = self.pad_id
        return [token for n, token in enumerate(ids) if token != pad or not n or ids[n - 1] != pad]

    def features(self, images: Sequence[Image]) -> dict[str, Any]:
        """Return the model's arguments for the images of a batch, row by row."""
        return dict(self.processor(list(images), return_tensors="pt"))
