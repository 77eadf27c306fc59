"""Ends a training from a thread that watches it: by an exception where the main thread waits, or else by force."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from verl_tool.errors import VerlToolError

EXIT_CODE = 75
"""Of a process that was ended by force (EX_TEMPFAIL)."""
GRACE = 30.0
"""Seconds that the main thread has to get out of what it does."""
_SIGNAL = signal.SIGUSR1


class TrainingAbortedError(VerlToolError):
    """What a thread that watches the training found."""


class _Training:
    """One training under way in this process's main thread."""

    def __init__(self) -> None:
        self.cause: TrainingAbortedError | None = None
        self.left = threading.Event()


_under_way: _Training | None = None


@contextmanager
def aborted_by_watchers() -> Iterator[None]:
    """Within the block, `abort_training` raises its error here. For the main thread."""
    global _under_way
    training = _under_way = _Training()
    signal.signal(_SIGNAL, _raise)
    try:
        yield
    except KeyboardInterrupt:
        if training.cause is None:
            raise
        raise training.cause from None
    finally:
        # Not as it was before: a watcher may just now be on its way.
        signal.signal(_SIGNAL, signal.SIG_IGN)
        _under_way = None
        training.left.set()


def abort_training(cause: TrainingAbortedError) -> None:
    """End the training under way in this process, or without one the process. For any thread but the main one.

    Of several causes the first counts.
    """
    print(cause, file=sys.stderr, flush=True)
    training = _under_way
    if training is None:
        os._exit(EXIT_CODE)
    training.cause = training.cause or cause
    os.kill(os.getpid(), _SIGNAL)
    if not training.left.wait(GRACE):
        os._exit(EXIT_CODE)


def _raise(number: int, frame: FrameType | None) -> None:
    # The only exception that gets through `ray.get` while it waits.
    raise KeyboardInterrupt
