"""Containers of few images, some of them started before they are needed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import OrderedDict
from dataclasses import replace

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends.container import Container
from verl_tool.sandbox.backends.row_limits import apply_row_limits
from verl_tool.sandbox.backends.settings import ContainerSettings
from verl_tool.sandbox.limits import SessionLimits
from verl_tool.util.slots import wait_in_queue
from verl_tool.workspace_limits import NO_LIMITS, WorkspaceLimits

MAX_IMAGES = 8
"""Images whose containers wait: those that were taken last, each with the same limits."""
_Kind = tuple[str, WorkspaceLimits]


class ContainerPool:
    """Gives out started containers. `close` it."""

    def __init__(self, settings: ContainerSettings, limits: SessionLimits, warm: int) -> None:
        """warm: how many of each image wait for their trajectory, once one was taken or `fill` was called."""
        self._settings, self._limits, self._warm = settings, limits, warm
        self._waiting: OrderedDict[_Kind, set[asyncio.Task[Container]]] = OrderedDict()
        """By image and what rows request, the kind that was taken last at the end."""
        self._ending: set[asyncio.Task[None]] = set()

    def fill(self, image: str = "", limits: WorkspaceLimits = NO_LIMITS) -> None:
        """Start what is missing of an image, by default that of the settings. Does not wait."""
        if not self._warm:
            return
        kind = image or self._settings.image, limits
        tasks = self._waiting.setdefault(kind, set())
        self._waiting.move_to_end(kind)
        start = asyncio.get_running_loop().create_task
        while len(tasks) < self._warm:
            # Not in the context of the action that took one.
            tasks.add(contextvars.Context().run(start, self._start(*kind)))
        while len(self._waiting) > MAX_IMAGES:
            _, unused = self._waiting.popitem(last=False)
            ending = start(_stop(unused))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def take(self, image: str = "", limits: WorkspaceLimits = NO_LIMITS) -> Container:
        """Return a started container, which the caller stops. image: another one than that of the settings. limits: in
        place of those of the settings. Raises what `Container.start` does."""
        kind = image or self._settings.image, limits
        for _ in range(len(self._waiting.get(kind, ()))):
            tasks = self._waiting.get(kind)
            if not tasks:
                break
            task = next((task for task in tasks if task.done()), None) or next(iter(tasks))
            tasks.remove(task)
            self.fill(*kind)
            with contextlib.suppress(SandboxError):
                with wait_in_queue():
                    container = await task
                if container.alive:
                    return container
                await container.stop()
        container = await self._start(*kind)
        self.fill(*kind)
        return container

    async def close(self) -> None:
        """Stop those that nobody took."""
        unused, self._waiting, self._warm = self._waiting, OrderedDict(), 0
        await asyncio.gather(*self._ending, *map(_stop, unused.values()))

    async def _start(self, image: str, limits: WorkspaceLimits) -> Container:
        container = Container(*apply_row_limits(limits, replace(self._settings, image=image), self._limits))
        await container.start()
        return container


async def _stop(tasks: set[asyncio.Task[Container]]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
    for done in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(done, Container):
            await done.stop()
