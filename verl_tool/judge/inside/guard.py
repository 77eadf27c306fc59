"""Refuses, while a test runs, to make code of data and to start programs, whichever library is asked to (PEP 578).

A test calls libraries with what the solution gave back; some of them compile, unpickle or run it. Sent into the sandbox
beside the judge.
"""

import ast
import collections
import sys

_RUN_EVENTS = (
    "code.__new__ ctypes.call_function ctypes.dlopen ctypes.dlsym function.__new__ marshal.load marshal.loads os.exec "
    "os.fork os.forkpty os.posix_spawn os.spawn os.system pickle.find_class pty.spawn subprocess.Popen"
)
_RUNS = frozenset(_RUN_EVENTS.split())
"""Audit events."""
_IMPORTS = "<frozen importlib"


class Guard:
    """Watches the process from now on, and refuses between `begin` and `end`."""

    def __init__(self):
        self._link = None
        self._own = frozenset("")
        self._path = []
        sys.addaudithook(self._look)

    def begin(self, link, own):
        """`own`: texts that stand in the test, which may be compiled."""
        self._own = frozenset(text.strip() for text in own)
        self._path = list(sys.path)
        self._link = link

    def end(self):
        """The test is over."""
        self._link = None

    def _look(self, event, args):
        if self._link is None:
            return
        if event == "compile":
            if not self._is_own(args[0]) and not _may_compile(sys._getframe(1)):
                raise self._link.reject("compiling a text")
        elif event in _RUNS:
            if not _is_import(sys._getframe(1)):
                raise self._link.reject(event)
        elif event == "exec" and sys.path != self._path and _is_import(sys._getframe(1)):
            raise self._link.reject("an import from elsewhere")

    def _is_own(self, source):
        if isinstance(source, bytes):
            source = source.decode("utf-8", "replace")
        return isinstance(source, str) and source.strip() in self._own


def _may_compile(frame):
    """Imports, and what Python's own classes make of names that they have checked."""
    module = frame.f_globals.get("__name__")
    if module == "dataclasses":
        return frame.f_code.co_filename == sys.modules[module].__file__
    return frame.f_code in _COMPILE or _is_import(frame)


_COMPILE = frozenset({ast.parse.__code__, collections.namedtuple.__code__})


def _is_import(frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTS):
            return True
        frame = frame.f_back
    return False
