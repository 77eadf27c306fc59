"""Track the trajectory for which code is running, so that log messages can name it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_now: ContextVar[str] = ContextVar("trajectory", default="")


def trajectory_now() -> str:
    """Return the id of the current trajectory, or an empty string if there is none."""
    return _now.get()


@contextmanager
def running_for(trajectory_id: str) -> Iterator[None]:
    """Make this the current trajectory within the block, and in tasks that are started there."""
    token = _now.set(trajectory_id)
    try:
        yield
    finally:
        _now.reset(token)
