"""Requests that programs of a container write to a folder of theirs, for `CommandRelay`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_tool.sandbox.backends.container import Container

_READ_BYTES = 1 << 16
_READ = f"""
import os
pipe = os.open({{path!r}}, os.O_RDWR)
while True:
    os.write(1, os.read(pipe, {_READ_BYTES}))
"""
"""Run by the resident's interpreter: the image's programs may have been changed by those of a trajectory."""


class ContainerRequestFolder:
    """See `RequestFolder`."""

    def __init__(self, container: Container, folder: str) -> None:
        self._container, self._folder = container, folder

    @contextlib.asynccontextmanager
    async def listening(self, receive: Callable[[bytes], None]) -> AsyncIterator[None]:
        # Opened for writing too, so that reading never reaches the end of the pipe.
        code = _READ.format(path=f"{self._folder}/requests")
        program = await self._container.spawn_inside([], cwd="/", python=code)

        async def pump() -> None:
            while data := await program.stdout.read(_READ_BYTES):
                receive(data)

        task = asyncio.get_running_loop().create_task(pump())
        try:
            yield
        finally:
            program.kill()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def read(self, name: str) -> bytes:
        limit = self._container.limits.disk_bytes
        return (await self._container.ask_for_file("read", f"{self._folder}/{name}", bytes=limit))[1]

    async def write(self, name: str, content: bytes) -> None:
        await self._container.ask_for_file("write", f"{self._folder}/{name}", content, make=True)

    async def notify(self, name: str) -> None:
        await self._container.ask_for_file("write", f"{self._folder}/{name}", b"\n", make=False)
