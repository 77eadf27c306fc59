"""A command of a session: a confined process becomes any program of the sandbox."""

from __future__ import annotations

import _signal
import ctypes
import marshal
import os

TYPE_CHECKING = False  # `typing` itself makes every fork dearer
if TYPE_CHECKING:
    from typing import NoReturn

_TIOCSCTTY = 0x540E
_NOT_FOUND, _NOT_RUN = 127, 126


def become(packed: bytes) -> NoReturn:
    """Become the program, or end with a message on stderr and an exit code as a shell would.

    `packed`: marshalled arguments, environment variables on top of the usual ones, directory, and whether stdin is a
    terminal, which then controls the program and what it starts.
    """
    arguments, variables, directory, terminal = marshal.loads(packed)
    at = directory
    try:
        if terminal:
            ctypes.CDLL(None).ioctl(0, _TIOCSCTTY, 0)
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them, programs do not expect it
            _signal.signal(number, _signal.SIG_DFL)
        os.chdir(directory)
        at = arguments[0]
        os.execvpe(at, arguments, {**os.environ, **variables})
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        os.write(2, f"{at}: {why}\n".encode(errors="replace"))
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUN)
