"""Wait for several tasks with little overhead."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


async def wait_all(tasks: Collection[asyncio.Task[Any]], seconds: float | None) -> None:
    """Wait until all `tasks` are done, or `seconds` have passed. Like `asyncio.wait`, it neither cancels tasks nor
    raises their exceptions. It returns nothing and costs half as much."""
    left = sum(not task.done() for task in tasks)
    if not left:
        return
    loop = asyncio.get_running_loop()
    all_done = loop.create_future()

    def one_done(_: asyncio.Task[Any]) -> None:
        nonlocal left
        left -= 1
        if not left:
            release()

    def release() -> None:
        if not all_done.done():
            all_done.set_result(None)

    for task in tasks:
        if not task.done():
            task.add_done_callback(one_done)
    timer = None if seconds is None else loop.call_later(seconds, release)
    try:
        await all_done
    finally:
        if timer is not None:
            timer.cancel()
