"""Images of containers: there before the first container is started, and asked once who their user is."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from typing import Any

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends.engine import ContainerEngine

_ASK_SECONDS = 60.0
_PULL_SECONDS = 1800.0
_MAX_COMPLAINT_CHARACTERS = 500
_FORMAT = "{{.Config.User}}\n{{.Config.WorkingDir}}"


@dataclass(frozen=True)
class ImageSettings:
    """What the Dockerfile of an image says of its programs."""

    user: str
    """``USER``: names or numbers."""
    workdir: str
    """``WORKDIR``."""


_images: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], asyncio.Task[ImageSettings]]]
_images = weakref.WeakKeyDictionary()
"""By event loop, engine and image."""


async def image_settings(engine: ContainerEngine, image: str) -> ImageSettings:
    """Describe an image. One that is not there is pulled, once for all who ask. Raises SandboxError if it cannot be
    had."""
    images = _images.setdefault(asyncio.get_running_loop(), {})
    key = (engine.command, image)
    if key not in images:
        images[key] = asyncio.get_running_loop().create_task(_settings(engine, image))
    try:
        return await asyncio.shield(images[key])
    except SandboxError:
        images.pop(key, None)
        raise


async def _settings(engine: ContainerEngine, image: str) -> ImageSettings:
    ask = ["image", "inspect", "--format", _FORMAT, image]
    found = await engine.run(ask, seconds=_ASK_SECONDS)
    if found.code != 0:
        pulled = await engine.run(["pull", "--quiet", image], seconds=_PULL_SECONDS)
        if pulled.code != 0:
            words = pulled.stderr.decode(errors="replace").strip()[-_MAX_COMPLAINT_CHARACTERS:]
            late = f"not within {_PULL_SECONDS:g} s" if pulled.code is None else words
            raise SandboxError(f"{engine.command} has no image {image} and cannot pull it: {late}", retryable=True)
        found = await engine.run(ask, seconds=_ASK_SECONDS)
    if found.code != 0:
        words = found.stderr.decode(errors="replace").strip()[-_MAX_COMPLAINT_CHARACTERS:]
        raise SandboxError(f"{engine.command} does not describe the image {image}: {words}", retryable=True)
    user, _, workdir = found.stdout.decode(errors="replace").partition("\n")
    return ImageSettings(user.strip() or "0:0", workdir.strip() or "/")
