"""Run a command of a session: replace a confined process with a program of the sandbox."""

from __future__ import annotations

import _signal
import ctypes
import marshal
import os

TYPE_CHECKING = False  # importing `typing` makes every fork slower
if TYPE_CHECKING:
    from typing import NoReturn

_TIOCSCTTY = 0x540E
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def become(packed: bytes) -> NoReturn:
    """Execute the program, or exit with a message on stderr and an exit code like a shell.

    `packed` contains, marshalled: arguments, additional environment variables, directory, and whether stdin is a
    terminal, which then becomes the controlling terminal.
    """
    arguments, variables, directory, terminal = marshal.loads(packed)
    at = directory
    try:
        if terminal:
            ctypes.CDLL(None).ioctl(0, _TIOCSCTTY, 0)
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them, but programs expect the default
            _signal.signal(number, _signal.SIG_DFL)
        os.chdir(directory)
        at = arguments[0]
        os.execvpe(at, arguments, {**os.environ, **variables})
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        os.write(2, f"{at}: {reason}\n".encode(errors="replace"))
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)
