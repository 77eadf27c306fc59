"""The processes that run the solution: it is never run in the judge's own.

The judge starts a spawner, which forks a fresh process each time the judge asks. The spawner is an interpreter of its
own and no fork of the judge: the sandbox may have read the judge's stdin before the judge's first line is run, and a
fork would have it in memory. So no process that runs the solution ever held the tests, the expected outputs or the
verdicts' token. Sent into the sandbox beside the judge.
"""

import _signal
import atexit
import builtins
import contextlib
import gc
import importlib
import io
import itertools
import json
import operator
import os
import socket
import struct
import sys
import time
import types
import warnings
from collections.abc import Callable

from link import PeerExitedError, ProcessLink, next_of, update
from values import CONTAINERS, encode

MODULE, PROGRAM, PREPARE = b"m", b"p", b"i"
"""Run as a module whose functions are called over a `ProcessLink`; run as a program with stdin and stdout; load, before
any process is started, what all of them need."""
_PRELUDE_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
PRELUDE = "".join(
    [f"from {name} import *\n" for name in f"{_PRELUDE_MODULES} builtins typing".split()]
    + [f"import {name}\n" for name in _PRELUDE_MODULES.split()]
)
"""What LiveCodeBench and verl's `prime_code` put before a solution; solutions on LeetCode and the like rely on it."""
RECURSION_LIMIT = 600_000
"""That of verl's `prime_code`; LiveCodeBench's is 50,000."""
MAX_DIGITS = 50_000
"""Of a number that is read or printed: LiveCodeBench's."""
LINK_RECURSION_LIMIT = 3000
"""While values are written for the judge, which reads none that are nested so deep."""
STACK_BYTES = 120 << 20
"""Of C's stack, for recursion through `functools.cache`. The kernel leaves 128 MiB below the stack of a program."""
UNCAUGHT = 99
"""Exit code of a program that an exception has ended. Any other one is the program's own choice."""
LONGEST_PRINT = 1 << 20
"""Bytes that a test finds in what it has put in place of stdout, of one call."""
MAX_ITEMS = 100_000
"""Of a global value of the solution's that a test may compare."""
LONGEST_GLOBAL = 1 << 20
"""Characters of its JSON."""
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); import processes; processes.main()"
"""A spawner's program: a file that is imported need not be compiled again."""
LAST_NAME = "__builtins__"
"""In the order of a program's global names, of those that it finds."""
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_SIZED = (list, tuple, set, frozenset, dict, str, bytes, bytearray)
_NUMBER = struct.Struct("i")
_PROGRAMS = struct.Struct("idd")
"""Descriptors of each program, seconds for each, and when the time of all is over."""
_SIGCHLD = (_signal.SIGCHLD,)
_END = struct.Struct("ii")
ENDED, LATE, UNSTARTED = 0, 1, 2
"""How a program ended: by itself, killed since its time was over, or not begun since that of all was."""
MAX_PROGRAMS = 32
"""That the spawner is sent at a time: a message holds 253 descriptors."""
GRACE_SECONDS = 10.0
"""For the spawner to kill a program and to say so, on a busy machine."""
SWEEP_SECONDS = 1.0
"""For ending what a program has left running."""
BOX, FOLDERS = "/box", ("work", "tmp", "shm")
"""All that a run in the sandbox can write to, and what is in there at its start. It has that and its process numbers
to itself."""


class Spawner:
    """Forks the processes that run the solution, one at a time.

    `folder`: where this file lies. `path`: the `sys.path` of the solution. `hidden`: no other process may look into
    the spawner and what it starts, which then finds nothing in `folder`; it is for what is not the solution.
    """

    def __init__(self, folder, path, hidden=False):
        import subprocess  # not needed by the spawner itself, whose imports every judging pays for

        self._control, theirs = socket.socketpair()
        self._running = None
        null = subprocess.DEVNULL
        program = [sys.executable, "-I", "-S", "-c", _START]
        with theirs:
            arguments = [str(theirs.fileno()), json.dumps([folder, *path]), *(["hidden"] if hidden else [])]
            # Of no use but to be reaped; what it says comes over the socket.
            self._process = subprocess.Popen(
                program + arguments,
                stdin=null,
                stdout=null,
                stderr=null,
                pass_fds=[theirs.fileno()],
                # No process that it forks has to look up the libraries' functions.
                env={**os.environ, "LD_BIND_NOW": "1"},
            )

    def wait_until_ready(self, seconds):
        """Return when it can start processes. Raises TimeoutError, or `PeerExitedError` if it ended."""
        self._control.settimeout(seconds)
        self._receive()
        self._control.settimeout(None)

    def prepare(self, source, prelude, modules, seconds):
        """Load what all processes need, once: the program's text, the `PRELUDE` and libraries. Called before any line
        of the solution is run. Raises TimeoutError, or `PeerExitedError` if the spawner ended."""
        import tempfile  # as above

        with tempfile.TemporaryFile() as file:
            file.write(json.dumps({"source": source, "prelude": prelude, "modules": modules}).encode())
            file.seek(0)
            socket.send_fds(self._control, [PREPARE], [file.fileno()])
            self.wait_until_ready(seconds)

    def start(self, mode, descriptors):
        """Start a process in `mode` that holds copies of `descriptors`; one that runs still is killed."""
        self.stop()
        with _without_alarm():
            socket.send_fds(self._control, [mode], descriptors)
            (self._running,) = _NUMBER.unpack(self._receive())

    def run_programs(self, programs, seconds, ends):
        """Run programs one after the other, each with its descriptors of stdin and stdout (and stderr). How each ended:
        one of `ENDED`, `LATE` and `UNSTARTED`, and the exit status as of `os.waitstatus_to_exitcode`.

        `seconds`: for each; `ends`: when the time of all is over, by `time.monotonic`. They are sent at once, so that a
        program need not wait until the judge has read the one before.
        """
        self.stop()
        header = PROGRAM + _PROGRAMS.pack(len(programs[0]), seconds, ends)
        socket.send_fds(self._control, [header], [number for program in programs for number in program])
        for _ in programs:
            self._control.settimeout(seconds + GRACE_SECONDS)
            how, status = _END.unpack(self._receive(_END.size))
            yield how, os.waitstatus_to_exitcode(status)
        self._control.settimeout(None)

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
            _kill_group(self._running)
            self.wait()

    def _receive(self, size=_NUMBER.size):
        data = b""
        while len(data) < size:
            part = self._control.recv(size - len(data))
            if not part:
                raise PeerExitedError("the process that starts the solution's has ended")
            data += part
        return data


@contextlib.contextmanager
def _without_alarm():
    """Hold the judge's alarm back: half a message read would put the next one out of step."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGALRM])
    try:
        yield
    finally:
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGALRM])


def hide():
    """Keep other processes of the same user from looking into this one's memory and descriptors, and into those of its
    forks. See prctl(2). Raises OSError if that is not in force."""
    import ctypes  # the spawner of the solution does without

    libc = ctypes.CDLL(None, use_errno=True)
    # A process that the sandbox has forked is so from its start.
    if libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) and libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")
    if libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0):
        raise OSError("prctl(PR_SET_DUMPABLE) has no effect")


def be_spawner(control, hidden):
    """Returns in each process that it starts: the mode, the descriptors and what was prepared."""
    os.environ.pop("LD_BIND_NOW", None)
    sys.argv = ["solution.py"]
    for name in ("exit", "quit"):
        setattr(builtins, name, _leave)
    prepared = None
    try:
        if hidden:
            hide()
            del sys.path[0]  # the folder, where the solution may put files
        control.sendall(_NUMBER.pack(os.getpid()))
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1 + _PROGRAMS.size, 4 * MAX_PROGRAMS)
            mode = message[:1]
            if not mode:
                os._exit(0)
            if mode == PREPARE:
                prepared = Prepared(**_read_json(descriptors[0]))
                control.sendall(_NUMBER.pack(0))
                continue
            if mode == PROGRAM:
                chosen = _start_programs(control, descriptors, *_PROGRAMS.unpack(message[1:]))
                if chosen:
                    descriptors = chosen
                    break
                continue
            pid = os.fork()
            if pid == 0:
                break
            for descriptor in descriptors:
                os.close(descriptor)
            control.sendall(_NUMBER.pack(pid))
            control.sendall(_NUMBER.pack(os.waitpid(pid, 0)[1]))
    except BaseException:  # noqa: BLE001  whatever it is, the judge is told by the end of the socket
        os._exit(1)
    os.close(control.detach())
    return mode, descriptors, prepared


def _start_programs(control, descriptors, each, seconds, ends):
    """Run a process for every `each` descriptors and tell how it ended. In such a process: its descriptors."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _SIGCHLD)
    alone = os.path.dirname(os.getcwd()) == os.path.dirname(os.path.realpath("/tmp")) == BOX
    while descriptors:
        if alone:  # without isolation these would be the host's processes and files
            end_other_processes()
            empty_box()
        chosen, descriptors = descriptors[:each], descriptors[each:]
        left = min(seconds, ends - time.monotonic())
        pid = os.fork() if left > 0 else None
        if pid == 0:
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _SIGCHLD)
            for descriptor in descriptors:
                os.close(descriptor)
            return chosen
        for descriptor in chosen:
            os.close(descriptor)
        end = (UNSTARTED, 0) if pid is None else _wait(pid, time.monotonic() + left)
        control.sendall(_END.pack(*end))
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _SIGCHLD)
    return None


def _wait(pid, ends):
    """Wait for a program until its time is over; nothing of its process group is left running."""
    how = ENDED
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        left = ends - time.monotonic()
        if left <= 0:
            how = LATE
            break
        _signal.sigtimedwait(_SIGCHLD, left)
    _kill_group(pid)
    return how, os.waitpid(pid, 0)[1]


def _kill_group(pid):
    """Kill a process and its group, as far as they are there and this user's."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, _signal.SIGKILL)


def end_other_processes():
    """End what an earlier program has left running, in a session of its own say: all processes but the first one of the
    namespace, the judge, and those that it has started."""
    init, judge, me = 1, os.getppid(), os.getpid()
    ends = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < ends:
        others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in (init, judge, me)]
        left = [pid for pid in others if _parent_of(pid) not in (None, judge)]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, _signal.SIGKILL)


def _parent_of(pid):
    """None for a process that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent, *_ = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in (b"Z", b"X") else int(parent)


def empty_box():
    """Remove whatever programs have written, however deep: what is in a folder is moved up before that is removed."""
    while others := [entry for entry in _entries(BOX) if entry.name not in FOLDERS or not _is_folder(entry)]:
        for entry in others:
            _remove(entry, BOX)
    for name in FOLDERS:
        os.makedirs(f"{BOX}/{name}", exist_ok=True)
        _empty(f"{BOX}/{name}")
    os.chdir(f"{BOX}/{FOLDERS[0]}")


def _empty(folder):
    while entries := _entries(folder):
        for entry in entries:
            _remove(entry, folder)


def _remove(entry, folder):
    """Remove a file, or a folder whose contents go to `folder`."""
    if not _is_folder(entry):
        os.unlink(entry.path)
        return
    for inner in _entries(entry.path):
        os.rename(inner.path, f"{folder}/{os.urandom(16).hex()}")
    os.rmdir(entry.path)


def _is_folder(entry):
    return entry.is_dir(follow_symlinks=False)


def _entries(folder):
    os.chmod(folder, 0o755)
    with os.scandir(folder) as found:
        return list(found)


def _read_json(descriptor):
    with open(descriptor, "rb") as file:
        return json.loads(file.read())


class Prepared:
    """What all processes of a solution share, loaded in the spawner. No line of the solution is run for it."""

    def __init__(self, source, prelude, modules):
        self.source = source
        self.program = _compiled(source)
        self.stored = _names_in(self.program) if self.program else ()
        self.names: dict[str, object] = {}
        if prelude:
            exec(PRELUDE, self.names)
            sys.setrecursionlimit(RECURSION_LIMIT)
            with contextlib.suppress(AttributeError):  # a Python that has no limit
                sys.set_int_max_str_digits(MAX_DIGITS)
            _raise_stack_limit()
        for name in modules:
            # A solution that imports it finds out itself why that fails.
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
        self.names.pop(LAST_NAME, None)
        self.globals = _module("__main__").__dict__
        self.globals.update(self.names, __file__="solution.py", **{LAST_NAME: builtins})
        gc.collect()
        gc.freeze()


def _compiled(source):
    """The program's code; None if a process of its own has to find out what is wrong with it.

    Python's usual recursion limit must be in force: under it no text makes the compiler use up the stack of C.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", SyntaxWarning)  # which each test's stderr shows
            return compile(source, "solution.py", "exec", dont_inherit=True)
    except Exception:  # noqa: BLE001  whatever the text is
        return None


def _raise_stack_limit():
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    soft = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def be_solution(mode, descriptors, prepared):
    """A process group of its own, so that a signal to the group spares the judge."""
    os.setpgid(0, 0)
    if mode == MODULE:
        _serve_module(descriptors[0], prepared)
    _run_program(prepared, *descriptors)


def _leave(code=None):
    """``exit`` and ``quit``, which Python's `site` adds to the builtins; it is not imported here."""
    raise SystemExit(code)


def _serve_module(descriptor, prepared):
    """Never returns."""
    code = 1
    try:
        SolutionLink(socket.socket(fileno=descriptor), prepared.names if prepared else {}).serve()
    except PeerExitedError:
        code = 0
    finally:
        os._exit(code)


def _run_program(prepared, stdin, stdout, *stderr):
    """Run the program as `__main__`. Nothing was read or written before. Never returns."""
    for number, descriptor in enumerate((stdin, stdout, *stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    names = prepared.globals
    code, assigned = UNCAUGHT, prepared.stored
    try:
        program = prepared.program
        if program is None:
            program = compile(prepared.source, "solution.py", "exec", dont_inherit=True)
            assigned = _names_in(program)
        exec(program, names)
        code = 0
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException:  # noqa: BLE001  told as Python does
        sys.excepthook(*sys.exc_info())
    _end_program(names, assigned, code)


def _exit_code(code):
    if code is None or isinstance(code, int):
        status = int(code or 0) & 0xFF
        return 1 if status == UNCAUGHT else status
    print(code, file=sys.stderr)
    return 1


def _end_program(names, assigned, code):
    """End as the interpreter does, but without taking the libraries apart, which costs more than most programs. Names
    that were there before the program, and that it does not store, go with the process."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        _flush(sys.stdout, sys.stderr)  # which may be the program's own, and need its names
        own = {*itertools.takewhile(LAST_NAME.__ne__, reversed(names)), *assigned}
        for lasting in ((types.ModuleType, types.FunctionType, type), ()):
            for name in own:
                if not isinstance(names.get(name), lasting):
                    names.pop(name, None)  # objects before what their `__del__` uses
        # A file that is still open writes what it holds. Without a second generation the first one is all.
        gc.collect(2 if gc.get_count()[2] else 1)
    finally:
        _flush(sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        os._exit(code)


def _flush(*streams):
    for stream in streams:
        with contextlib.suppress(Exception):  # it is closed, or the program's own
            stream.flush()


def _names_in(program):
    """The global names that it can set, and others."""
    found, parts = set(), [program]
    for part in parts:
        found.update(part.co_names)
        parts += [constant for constant in part.co_consts if isinstance(constant, types.CodeType)]
    return found


def _module(name):
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


class SolutionLink(ProcessLink):
    """The solution's end: its module, and the objects that the judge holds references to."""

    def __init__(self, sock, prelude):
        """`prelude`: names that the solution finds in its module without having defined them."""
        super().__init__(sock)
        self._module = _module("solution")
        self._prelude = prelude
        self._module.__dict__.update(prelude, __name__="solution")
        self._recursion_limit = sys.getrecursionlimit()
        sys.setrecursionlimit(min(self._recursion_limit, LINK_RECURSION_LIMIT))
        self._printed = _Printed()
        sys.stdout = io.TextIOWrapper(self._printed, "utf-8", "replace", newline="\n", write_through=True)
        self._objects = []
        self._number_of = {}

    def refer(self, value):
        if isinstance(value, TestCallable):
            return ["judge", value.number]
        number = self._number_of.get(id(value))
        if number is None:
            number = self._number_of[id(value)] = len(self._objects)
            self._objects.append(value)
        kind = type(value)
        if kind is types.GeneratorType:
            return ["generator", number]
        return ["iterator" if hasattr(kind, "__next__") and hasattr(kind, "__iter__") else "solution", number]

    def resolve(self, data):
        side, *rest = data
        if side == "library":
            return _found(*rest)
        if side == "iterator":
            return _test_iterator(self, *rest)
        return self._objects[rest[0]] if side == "solution" else TestCallable(self, rest[0])

    def take_printed(self):
        return self._printed.take()

    def line_of(self, error):
        line, at = None, error.__traceback__
        while at is not None:
            line = at.tb_lineno if at.tb_frame.f_code.co_filename == "solution.py" else line
            at = at.tb_next
        return line

    def perform(self, operation, args, kwargs):
        """The solution's own recursion limit holds while its code runs, and a low one while values are written."""
        outer = sys.getrecursionlimit()
        sys.setrecursionlimit(self._recursion_limit)
        try:
            return self._perform(operation, args, kwargs)
        finally:
            self._recursion_limit = sys.getrecursionlimit()
            sys.setrecursionlimit(outer)

    def _perform(self, operation, args, kwargs):
        if operation == "load":
            return self._load(*args)
        if operation == "eval":
            (text,) = args
            return eval(text, self._module.__dict__)  # noqa: S307  where the solution runs
        return OPERATIONS[operation](*args, **kwargs)

    def _load(self, text):
        """Run the solution; its global names: ``[name, kind, JSON of the value]``, modules left out."""
        names = self._module.__dict__
        exec(compile(text, "solution.py", "exec"), names)
        return [
            [name, *self._described(value)]
            for name, value in names.items()
            if not name.startswith("__") and not isinstance(value, types.ModuleType)
            if name not in self._prelude or self._prelude[name] is not value
        ]

    def _described(self, value):
        """A large value goes by reference: to copy a table of primes that no test looks at would take its time."""
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == "solution":
            return "exception", json.dumps([kind.__name__ for kind in value.__mro__])
        text = ""
        if type(value) not in _SIZED or len(value) <= MAX_ITEMS:
            with contextlib.suppress(RecursionError):  # it contains itself
                text = json.dumps(encode(value, self.refer))
        return "value", text if 0 < len(text) < LONGEST_GLOBAL else json.dumps(self.refer(value))


class TestCallable:
    """A function of the test's, as the solution sees it."""

    def __init__(self, link, number):
        self.link = link
        self.number = number

    def __call__(self, *args, **kwargs):
        return self.link.ask("call", self.number, *args, **kwargs)


def _test_iterator(link, number):
    """An iterator of the test's, as the solution sees it: a generator, so that a ``for`` and `next` work."""
    while True:
        more, value = link.ask("next", number)
        if not more:
            return
        yield value


class _Printed(io.BytesIO):
    """What the solution prints in a call; the judge is told of the beginning."""

    def fileno(self):
        return 1

    def write(self, data):
        if self.tell() < LONGEST_PRINT:
            super().write(data)
        return len(data)

    def take(self):
        """What was written since."""
        if not self.tell():
            return ""
        text = self.getvalue()[:LONGEST_PRINT].decode("utf-8", "replace")
        self.seek(0)
        self.truncate()
        return text


def _found(home, path):
    """A function or a class of Python's that a test has passed."""
    return operator.attrgetter(path)(importlib.import_module(home))


def _items(value, longest):
    """A list of what a container holds; None if it is none, or has more than `longest` items."""
    try:
        items = list(itertools.islice(iter(value), longest + 1))
    except Exception:  # noqa: BLE001  the solution's own method
        return None
    return items if len(items) <= longest else None


def _replace(operation, owner, key, state):
    """Bring a container that an object holds into a state."""
    held = OPERATIONS[operation](owner, key)
    if isinstance(held, CONTAINERS):
        update(held, state)


OPERATIONS: "dict[str, Callable]" = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "replace": _replace,
    "delitem": operator.delitem,
    "setattr": setattr,
    "delattr": delattr,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
    "list": _items,
    "next": next_of,
    "len": len,
    "str": str,
    "repr": repr,
}


def main():
    """What a spawner runs."""
    be_solution(*be_spawner(socket.socket(fileno=int(sys.argv[1])), "hidden" in sys.argv[3:]))
