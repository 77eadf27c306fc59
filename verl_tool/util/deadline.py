"""A deadline for a block of one task, without a task of its own (`asyncio.wait_for` makes one before Python 3.12)."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType


class Deadline:
    """``with Deadline(5):`` cancels what the block awaits after 5 seconds, and raises asyncio.TimeoutError."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._passed = False

    def __enter__(self) -> Deadline:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a Deadline is used inside a task")
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._pass)
        return self

    def _pass(self) -> None:
        self._passed = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if not self._passed:
            return
        if sys.version_info >= (3, 11):
            self._task.uncancel()
        if kind is asyncio.CancelledError:
            raise asyncio.TimeoutError from error
