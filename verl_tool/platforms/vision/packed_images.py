"""The images of a trajectory on their way to whoever trains on it. Written for verl 0.9.0 and 0.9.1.

verl prepares the pixels where the agent loops run, twice a trajectory and in their event loop, and carries them from
there through the trainer to its workers: 24 bytes a pixel. Here the images' files travel, and a worker prepares the
pixels of a micro-batch when it needs them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from verl_tool.content.parts import ImagePart
from verl_tool.errors import ContentError
from verl_tool.platforms.patch import verl_patch

if TYPE_CHECKING:
    from PIL.Image import Image

PACKED = "verl_tool_packed_images"
"""Key of verl's ``multi_modal_inputs``: bytes in a tensor, since verl takes nothing else there. In place of
``pixel_values``."""
_THREADS = 8


def pack(processor: Any, images: Sequence[ImagePart]) -> torch.Tensor:
    """The images, and transformers' image processor that is to prepare them. [bytes]"""
    return torch.frombuffer(bytearray(pickle.dumps((processor, tuple(images)))), dtype=torch.uint8)


def pixel_values(packed: torch.Tensor) -> torch.Tensor:
    """What the model is given for packed images. [patches, values of a patch]"""
    processor, images = pickle.loads(packed.numpy().tobytes())

    def prepared(image: ImagePart) -> torch.Tensor:
        return processor(images=[_pixels(image)], return_tensors="pt")["pixel_values"]

    with ThreadPoolExecutor(_THREADS) as threads:
        return torch.cat(list(threads.map(prepared, images)))


def _pixels(image: ImagePart) -> Image:
    try:
        return image.decode()
    except ContentError:
        from PIL import Image

        # The engine could not read it either: the trajectory is a fault, and nothing of it is in the loss.
        return Image.new("RGB", (image.width, image.height))


def _unpacking(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def extract_multi_modal_inputs(batch_data: Sequence[Any], indices: Sequence[int] | None = None) -> dict[str, Any]:
        chosen = batch_data if indices is None else [batch_data[i] for i in indices if i < len(batch_data)]
        return original([_unpacked(getattr(inputs, "data", inputs)) for inputs in chosen])

    return extract_multi_modal_inputs


def _unpacked(inputs: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if inputs is None or PACKED not in inputs:
        return inputs
    others = {key: value for key, value in inputs.items() if key != PACKED}
    return {**others, "pixel_values": pixel_values(inputs[PACKED])}


def _made_by_the_loop(worker: type[Any]) -> type[Any]:
    compute: Callable[..., dict[str, Any]] = worker._compute_multi_modal_inputs

    def _compute_multi_modal_inputs(self: Any, output: Any, input_ids: torch.Tensor) -> dict[str, Any]:
        made = getattr(output, "model_inputs", None)
        return compute(self, output, input_ids) if made is None else dict(made)

    worker._compute_multi_modal_inputs = _compute_multi_modal_inputs
    return worker


UNPACKED = verl_patch(
    "utils.model",
    "extract_multi_modal_inputs",
    why="the pixels of a whole batch are carried through the trainer",
    replace=_unpacking,
)
INPUTS_OF_THE_LOOP = verl_patch(
    "experimental.agent_loop.agent_loop",
    "AgentLoopWorker",
    why="the pixels of each trajectory are prepared twice, in the event loop of all others",
    replace=_made_by_the_loop,
)
