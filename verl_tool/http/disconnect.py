"""Cancel the work for a client that has disconnected."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from verl_tool.http.messages import Disconnected

_WATCH_AFTER_SECONDS = 0.5
"""Work that ends sooner is not watched, because a watcher costs a task."""

Result = TypeVar("Result")


async def until_disconnect(work: Awaitable[Result], receive: Receive) -> Result:
    """Await `work` in the task of the caller and return its result. Call it after the whole body has been received.

    If the client disconnects first, `work` is cancelled and Disconnected is raised.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a request is served inside a task")
    watcher = _Watcher(task, receive)
    try:
        return await work
    except asyncio.CancelledError:
        if not watcher.client_left:
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise Disconnected from None
    finally:
        watcher.close()


async def reject_disconnected(receive: Receive) -> None:
    """Raise Disconnected if the client has left. For answers that must not be lost: short work is not watched
    (`until_disconnect`)."""
    message = asyncio.ensure_future(receive())
    try:
        await asyncio.wait([message], timeout=0)
        if message.done() and message.result()["type"] == "http.disconnect":
            raise Disconnected
    finally:
        message.cancel()


class _Watcher:
    """Cancels the task if the client disconnects."""

    def __init__(self, task: asyncio.Task[object], receive: Receive) -> None:
        self.client_left = False
        self._task = task
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_SECONDS, self._begin)

    def close(self) -> None:
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()

    def _begin(self) -> None:
        self._watch = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_left = True
        self._task.cancel()
