"""Abort a training from a thread that watches it: raise in the main thread, or else end the process by force."""

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
"""Exit code of a process that was ended by force (EX_TEMPFAIL)."""
GRACE = 30.0
"""Time in seconds for the main thread to stop."""
_SIGNAL = signal.SIGUSR1


class TrainingAbortedError(VerlToolError):
    """A thread that watches the training aborted it."""


class _Training:
    """A training in progress in this process's main thread."""

    def __init__(self) -> None:
        self.cause: TrainingAbortedError | None = None
        self.left = threading.Event()


_under_way: _Training | None = None


@contextmanager
def aborted_by_watchers() -> Iterator[None]:
    """Within this block, `abort_training` raises its error here. Use it in the main thread."""
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
        # Do not restore the old handler: a watcher may be sending the signal right now.
        signal.signal(_SIGNAL, signal.SIG_IGN)
        _under_way = None
        training.left.set()


def abort_training(cause: TrainingAbortedError) -> None:
    """Abort the training in this process or, if there is none, end the process. Call it from any thread but the main
    thread. If it is called several times, the first cause is raised.
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
    # The only exception that interrupts a waiting `ray.get`.
    raise KeyboardInterrupt
