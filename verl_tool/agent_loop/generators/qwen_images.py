"""Images as Qwen2-VL, Qwen2.5-VL and Qwen3-VL read them: their placeholder, their tokens and their features.

An image has one ``<|image_pad|>`` for each feature, as transformers wants it. vLLM wants one for each image.
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
"""``model_type`` of the models that read images in this way."""
VIDEO_PAD = "<|video_pad|>"


class QwenImageProcessor(Protocol):
    """What is used of transformers' image processors of these models, such as ``Qwen2VLImageProcessorPil``, which needs
    no torchvision."""

    patch_size: int
    merge_size: int
    size: Mapping[str, int]
    """``shortest_edge`` and ``longest_edge``: fewest and most pixels of an image."""

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, Any]) -> int: ...

    def __call__(self, images: Sequence[Image], *, return_tensors: str) -> Mapping[str, Any]: ...


class QwenImages:
    """`ImageTokens` of these models, and what a model of transformers is given for their images."""

    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"

    def __init__(self, processor: QwenImageProcessor, tokenizer: Tokenizer) -> None:
        """Raises ConfigError if the tokenizer has not these tokens."""
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
        """What an engine must never sample, as verl has it: tokens that stand for a part of an image or video."""

    def of(self, image: ImagePart) -> list[int]:
        """The image's tokens. Raises ContentError for one that the model does not take: too long and thin."""
        try:
            patches = self.processor.get_number_of_image_patches(image.height, image.width, {})
        except ValueError as error:
            raise ContentError(f"an image of {image.width} x {image.height} pixels: {error}") from error
        return [self._begin, *[self.pad_id] * (patches // self.processor.merge_size**2), self._end]

    def grid(self, image: ImagePart) -> tuple[int, int, int]:
        """Frames, rows and columns of the patches that an image is cut into, as the model is told of them
        (``image_grid_thw``). Needs transformers."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        patch, size = self.processor.patch_size, self.processor.size
        side = patch * self.processor.merge_size
        limits = (size["shortest_edge"], size["longest_edge"])
        height, width = smart_resize(image.height, image.width, side, *limits)
        return 1, height // patch, width // patch

    def one_each(self, ids: Sequence[int]) -> list[int]:
        """`ids` as vLLM wants them, with one ``<|image_pad|>`` for each image: it puts in the others itself."""
        pad = self.pad_id
        return [token for n, token in enumerate(ids) if token != pad or not n or ids[n - 1] != pad]

    def features(self, images: Sequence[Image]) -> dict[str, Any]:
        """Arguments of the model for the images of a batch, row by row."""
        return dict(self.processor(list(images), return_tensors="pt"))
