"""Prevent, while a test runs, that a library turns data into code or starts programs (PEP 578).

A test calls libraries with values that the solution returned, and some libraries compile, unpickle or execute them.
Sent into the sandbox with the judge.
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
    """Audit hook of this process, active between `begin` and `end`."""

    def __init__(self):
        self._link = None
        self._trusted_texts = frozenset("")
        self._path = []
        sys.addaudithook(self._check_event)

    def begin(self, link, texts):
        """Start to check events. `texts` are part of the test, and may be compiled."""
        self._trusted_texts = frozenset(text.strip() for text in texts)
        self._path = list(sys.path)
        self._link = link

    def end(self):
        """Stop to check events."""
        self._link = None

    def _check_event(self, event, args):
        if self._link is None:
            return
        if event == "compile":
            if not self._is_trusted(args[0]) and not _can_compile(sys._getframe(1)):
                raise self._link.reject_test("compile of text that is not part of the test")
        elif event in _RUNS:
            if not _is_import(sys._getframe(1)):
                raise self._link.reject_test(f"{event} in a library, which may run data of the solution")
        elif event == "exec" and sys.path != self._path and _is_import(sys._getframe(1)):
            raise self._link.reject_test("an import after a change of the import path")

    def _is_trusted(self, source):
        if isinstance(source, bytes):
            source = source.decode("utf-8", "replace")
        return isinstance(source, str) and source.strip() in self._trusted_texts


def _can_compile(frame):
    """Whether this frame is an import, or a class of Python's that has checked the names which it compiles."""
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
