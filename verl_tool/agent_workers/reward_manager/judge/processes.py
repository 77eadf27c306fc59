"""The processes that run the solution: it is never run in the judge's own.

The nursery is forked before the judge has read anything that must stay hidden, and forks a fresh process each time the
judge asks; so no process that runs the solution has the tests, the expected outputs or the verdicts' token in memory.
Sent into the sandbox beside the judge.
"""

import contextlib
import ctypes
import operator
import os
import signal
import socket
import struct
import sys
import types

from link import Gone, Link

MODULE, PROGRAM = b"m", b"p"
"""Run as a module whose functions are asked for over a `Link`; run as a program with stdin and stdout."""
_PR_SET_DUMPABLE = 4
_NUMBER = struct.Struct("i")
_MOST_DESCRIPTORS = 4096


def set_dumpable(dumpable):
    """Whether other processes of the same user may look into this one's memory and descriptors. See prctl(2)."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")


class Nursery:
    """Forks the processes that run the solution, one at a time."""

    def __init__(self):
        self._control, theirs = socket.socketpair()
        self._running = None
        if os.fork() == 0:
            self._control.detach()
            _be_nursery(theirs)
        theirs.close()

    def start(self, mode, descriptors):
        """Start a process in `mode` that holds copies of `descriptors`; one that runs still is killed."""
        self.stop()
        with _without_alarm():
            socket.send_fds(self._control, [mode], descriptors)
            (self._running,) = _NUMBER.unpack(self._receive())

    def wait(self):
        """The exit status of the running process, once it has ended; as of `os.waitstatus_to_exitcode`."""
        (status,) = _NUMBER.unpack(self._receive())
        self._running = None
        return os.waitstatus_to_exitcode(status)

    def stop(self):
        """Kill the running process and those of its descendants that are in its group."""
        if self._running is None:
            return
        with _without_alarm():
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(self._running, signal.SIGKILL)
            self.wait()

    def _receive(self):
        data = self._control.recv(_NUMBER.size)
        if len(data) != _NUMBER.size:
            raise Gone("the process that starts the solution's has ended")
        return data


@contextlib.contextmanager
def _without_alarm():
    """Hold the judge's alarm back: half a message read would put the next one out of step."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])


def _be_nursery(control):
    """Never returns. All descriptors but `control` are given up first: they are the judge's."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.closerange(3, control.fileno())
        os.closerange(control.fileno() + 1, _MOST_DESCRIPTORS)
        while True:
            mode, descriptors, _, _ = socket.recv_fds(control, 1, 8)
            if not mode:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                control.close()
                _be_solution(mode, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            control.sendall(_NUMBER.pack(pid))
            control.sendall(_NUMBER.pack(os.waitpid(pid, 0)[1]))
    finally:
        os._exit(1)


def _be_solution(mode, descriptors):
    """Never returns. A process group of its own, so that a signal to the group spares the judge."""
    code = 1
    try:
        os.setpgid(0, 0)
        set_dumpable(True)
        if mode == MODULE:
            _fresh_streams()
            SolutionLink(socket.socket(fileno=descriptors[0])).serve()
        else:
            code = _run_program(*descriptors)
    except Gone:
        code = 0
    finally:
        os._exit(code)


def _fresh_streams():
    """The inherited ones may hold text that the judge has read or not yet written."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  it stays open as long as the process lives
    sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115


def _run_program(source, stdin, stdout):
    """Run the program in the file `source` as `__main__`; its exit code."""
    with open(source, encoding="utf-8") as file:
        text = file.read()
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.close(stdin)
    os.close(stdout)
    _fresh_streams()
    sys.argv = ["solution.py"]
    try:
        exec(compile(text, "solution.py", "exec"), _module("__main__").__dict__)
        return 0
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    finally:
        sys.stdout.flush()


def _module(name):
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


class SolutionLink(Link):
    """The solution's end: its module, and the objects that the judge holds references to."""

    def __init__(self, sock):
        super().__init__(sock)
        self._module = _module("solution")
        self._objects = []
        self._number_of = {}

    def refer(self, value):
        if isinstance(value, TestCallable):
            return ["judge", value.number]
        number = self._number_of.get(id(value))
        if number is None:
            number = self._number_of[id(value)] = len(self._objects)
            self._objects.append(value)
        return ["solution", number]

    def resolve(self, data):
        side, number = data
        return self._objects[number] if side == "solution" else TestCallable(self, number)

    def perform(self, operation, args, kwargs):
        if operation == "load":
            return self._load(*args)
        return OPERATIONS[operation](*args, **kwargs)

    def _load(self, text):
        """Run the solution; what its namespace holds: ``[name, kind, value]`` for each name."""
        names = self._module.__dict__
        exec(compile(text, "solution.py", "exec"), names)
        return [[name, *_kind(value)] for name, value in names.items() if not name.startswith("__")]


def _kind(value):
    """What the judge needs to know of a global name."""
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == "solution":
        return "exception", [kind.__name__ for kind in value.__mro__]
    home, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(home, str) and isinstance(name, str) and home != "solution":
        return "import", [home, name, value]
    return "value", value


class TestCallable:
    """A function of the test's, as the solution sees it."""

    def __init__(self, link, number):
        self.link = link
        self.number = number

    def __call__(self, *args, **kwargs):
        return self.link.ask("call", self.number, *args, **kwargs)


OPERATIONS = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "isinstance": isinstance,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "contains", "index")},
    **{name: getattr(operator, name) for name in ("eq", "lt", "le", "gt", "ge", "neg", "pos", "invert")},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")},
    **{name: getattr(operator, name) for name in ("and_", "or_", "xor", "lshift", "rshift")},
    **{kind.__name__: kind for kind in (len, iter, next, str, repr, bool, hash, int, float, abs, round, reversed)},
}
