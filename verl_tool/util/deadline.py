"""A deadline for a block of one task, without a task of its own (`asyncio.wait_for` makes one before Python 3.12), that
can be moved."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType


class Deadline:
    """``with Deadline(5):`` cancels what the block awaits after 5 seconds, and raises asyncio.TimeoutError."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """From its begin, without pauses."""
        self._passed = False

    def __enter__(self) -> Deadline:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a Deadline is used inside a task")
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(self.seconds, self._pass)
        self._pauses, self._left, self._exited = 0, 0.0, False
        return self

    @property
    def remaining_seconds(self) -> float:
        """0 behind the deadline."""
        return self._left if self._pauses else max(0.0, self._timer.when() - asyncio.get_running_loop().time())

    def extend(self, seconds: float) -> None:
        """Move it by so much. It has no effect after the deadline."""
        self.seconds += seconds
        if self._pauses:
            self._left += seconds
        else:
            self._move(self.remaining_seconds + seconds)

    def pause(self) -> None:
        """Let no time pass until `resume`, which must be called as often."""
        if not self._pauses:
            self._left = self.remaining_seconds
            self._timer.cancel()
        self._pauses += 1

    def resume(self) -> None:
        """End a `pause`."""
        self._pauses -= 1
        if not self._pauses:
            self._move(self._left)

    def _move(self, seconds: float) -> None:
        if self._passed or self._exited:
            return
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._pass)

    def _pass(self) -> None:
        self._passed = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._exited = True
        if not self._passed:
            return
        if sys.version_info >= (3, 11):
            self._task.uncancel()
        if kind is asyncio.CancelledError:
            raise asyncio.TimeoutError from error
