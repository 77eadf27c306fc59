"""Images of containers: described, and fetched if need be, once for all who ask."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from verl_tool.sandbox.backends.providers.protocol import ContainerProvider
from verl_tool.sandbox.backends.settings import ImageSettings
from verl_tool.util.slots import wait_in_queue

_images: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], asyncio.Task[ImageSettings]]]
_images = weakref.WeakKeyDictionary()
"""By event loop, provider and image."""


async def image_settings(provider: ContainerProvider, image: str) -> ImageSettings:
    """Describe an image. Raises SandboxError if it cannot be had."""
    images = _images.setdefault(asyncio.get_running_loop(), {})
    key = (provider.name, image)
    if key not in images:
        images[key] = asyncio.get_running_loop().create_task(provider.describe(image))
    try:
        with wait_in_queue():  # a pull is nobody's time
            return await asyncio.shield(images[key])
    except BaseException:
        task = images.get(key)
        if task is not None and task.done() and (task.cancelled() or task.exception() is not None):
            del images[key]  # the next one asks again
        raise
