"""Which trajectory the code that runs now runs for, so that what it logs can say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_now: ContextVar[str] = ContextVar("trajectory", default="")


def trajectory_now() -> str:
    """Its id; empty outside of any."""
    return _now.get()


@contextmanager
def running_for(trajectory_id: str) -> Iterator[None]:
    """Within the block, and in tasks that are started there, it is this trajectory."""
    token = _now.set(trajectory_id)
    try:
        yield
    finally:
        _now.reset(token)
