"""The processes that run the solution: it is never run in the judge's own.

The judge starts a nursery, which forks a fresh process each time the judge asks. The nursery is an interpreter of its
own and no fork of the judge: the sandbox may have read the judge's stdin before the judge's first line is run, and a
fork would have it in memory. So no process that runs the solution ever held the tests, the expected outputs or the
verdicts' token. Sent into the sandbox beside the judge.
"""

import contextlib
import json
import operator
import os
import signal
import socket
import struct
import sys
import types

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[2])

from link import Gone, Link  # only now is it on the path

MODULE, PROGRAM = b"m", b"p"
"""Run as a module whose functions are asked for over a `Link`; run as a program with stdin and stdout."""
_NUMBER = struct.Struct("i")


class Nursery:
    """Forks the processes that run the solution, one at a time.

    `folder`: where this file lies. `path`: the `sys.path` of the solution.
    """

    def __init__(self, folder, path):
        import subprocess  # not needed by the nursery itself, whose imports every judging pays for

        self._control, theirs = socket.socketpair()
        self._running = None
        null = subprocess.DEVNULL
        program = [sys.executable, "-I", "-S", os.path.join(folder, "processes.py")]
        with theirs:
            arguments = [str(theirs.fileno()), json.dumps([folder, *path])]
            # Of no use but to be reaped; what it says comes over the socket.
            self._process = subprocess.Popen(
                program + arguments, stdin=null, stdout=null, stderr=null, pass_fds=[theirs.fileno()]
            )

    def wait_until_ready(self, seconds):
        """Return when it can start processes. Raises TimeoutError, or `Gone` if it ended."""
        self._control.settimeout(seconds)
        self._receive()
        self._control.settimeout(None)

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


def be_nursery(control):
    """Never returns."""
    try:
        control.sendall(_NUMBER.pack(os.getpid()))
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
        if mode == MODULE:
            SolutionLink(socket.socket(fileno=descriptors[0])).serve()
        else:
            code = _run_program(*descriptors)
    except Gone:
        code = 0
    finally:
        os._exit(code)


def _run_program(source, stdin, stdout):
    """Run the program in the file `source` as `__main__`; its exit code. Nothing was read or written before."""
    with open(source, encoding="utf-8") as file:
        text = file.read()
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.close(stdin)
    os.close(stdout)
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

if __name__ == "__main__":
    be_nursery(socket.socket(fileno=int(sys.argv[1])))
