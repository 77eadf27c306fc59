"""The images of rows on their way to the agent loops. Written for verl 0.9.0 and 0.9.1.

verl opens each image of a row beside the bytes of its file, and what it opened travels as pixels: with the prompt to
the workers, to the reward, and back with each of its answers. Here it travels as its file, which the prompt holds
anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any

from verl_tool.platforms.patch import verl_patch

if TYPE_CHECKING:
    from PIL.Image import Image


def opened(data: bytes) -> Image:
    """An image that is pickled as the file `data`, and decoded by whoever looks at it."""
    from PIL import Image

    image = Image.open(BytesIO(data))
    own = {"__reduce__": lambda _self: (opened, (data,))}
    image.__class__ = type(image.__class__.__name__, (image.__class__,), own)
    return image


def _as_files(dataset: type[Any]) -> type[Any]:
    build: Callable[..., list[dict[str, Any]]] = dataset._build_messages

    def _build_messages(self: Any, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        messages = build(self, *args, **kwargs)
        for message in messages:
            for part in message["content"] if isinstance(message["content"], list) else ():
                if part.get("type") == "image" and isinstance(part.get("bytes"), bytes):
                    part["image"] = opened(part["bytes"])
        return messages

    dataset._build_messages = _build_messages
    return dataset


ROW_IMAGES = verl_patch(
    "utils.dataset.rl_dataset",
    "RLHFDataset",
    why="the pixels of a prompt's images travel with it, several times",
    replace=_as_files,
)
