"""Child processes that end when their parent does, however it ended."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable
from functools import partial

_PR_SET_PDEATHSIG = 1


def signalled_with_parent(number: signal.Signals) -> Callable[[], None]:
    """For `preexec_fn` of a `Popen`: the child gets this signal when the thread that started it is gone, even if it was
    killed. Linux only; elsewhere nothing happens."""
    return partial(_ask_for, number)


def _ask_for(number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
