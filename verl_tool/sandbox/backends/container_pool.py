"""Containers of one image, some of them started before they are needed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from dataclasses import replace

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends.container import Container
from verl_tool.sandbox.backends.settings import ContainerSettings
from verl_tool.sandbox.limits import SessionLimits
from verl_tool.util.slots import waiting


class ContainerPool:
    """Gives out started containers. `close` it."""

    def __init__(self, settings: ContainerSettings, limits: SessionLimits, warm: int) -> None:
        """warm: how many of the image of `settings` wait for their trajectory."""
        self._settings, self._limits, self._warm = settings, limits, warm
        self._waiting: set[asyncio.Task[Container]] = set()

    def fill(self) -> None:
        """Start what is missing. Does not wait."""
        while len(self._waiting) < self._warm:
            start = asyncio.get_running_loop().create_task
            # Not in the context of the action that took one.
            self._waiting.add(contextvars.Context().run(start, self._start(self._settings)))

    async def take(self, image: str = "") -> Container:
        """Return a started container, which the caller stops. image: another one than that of the settings. Raises what
        `Container.start` does."""
        if image and image != self._settings.image:
            return await self._start(replace(self._settings, image=image))
        for _ in range(len(self._waiting)):
            ready = [task for task in self._waiting if task.done()]
            task = (ready or list(self._waiting))[0]
            self._waiting.remove(task)
            self.fill()
            with contextlib.suppress(SandboxError):
                with waiting():
                    container = await task
                if container.alive:
                    return container
                await container.stop()
        return await self._start(self._settings)

    async def close(self) -> None:
        """Stop those that nobody took."""
        waiting, self._waiting, self._warm = self._waiting, set(), 0
        for task in waiting:
            if not task.done():
                task.cancel()
        for done in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(done, Container):
                await done.stop()

    async def _start(self, settings: ContainerSettings) -> Container:
        container = Container(settings, self._limits)
        await container.start()
        return container
