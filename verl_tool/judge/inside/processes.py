"""The processes that run the solution, which never runs in the judge's process.

The judge starts a spawner, which forks a fresh process at each request. The spawner is an interpreter of its own and
not a fork of the judge: the sandbox may have read the judge's stdin before its first line runs, and a fork would have
it in memory. So no process that runs the solution ever had the tests, the expected outputs or the token of the
verdicts. Sent into the sandbox with the judge.
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

from link import PeerExitedError, ProcessLink, take_next, update
from values import CONTAINERS, encode

MODULE, PROGRAM, PREPARE = b"m", b"p", b"i"
"""Modes: run as a module whose functions are called over a `ProcessLink`; run as a program with stdin and stdout;
before any process starts, load what all of them need."""
_PRELUDE_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
PRELUDE = "".join(
    [f"from {name} import *\n" for name in f"{_PRELUDE_MODULES} builtins typing".split()]
    + [f"import {name}\n" for name in _PRELUDE_MODULES.split()]
)
"""Imports that LiveCodeBench and `prime_code` of verl put before a solution, and on which solutions rely."""
RECURSION_LIMIT = 600_000
"""Recursion limit of verl's `prime_code`. LiveCodeBench has 50,000."""
MAX_DIGITS = 50_000
"""Maximum digits of an integer that is parsed or printed, as in LiveCodeBench."""
LINK_RECURSION_LIMIT = 3000
"""Recursion limit while values are encoded. The judge does not decode deeper ones."""
STACK_BYTES = 120 << 20
"""Size of the C stack, for recursion through `functools.cache`. The kernel leaves 128 MiB below a program's stack."""
UNCAUGHT = 99
"""Exit code of a program with an uncaught exception. Any other exit code is chosen by the program."""
MAX_OUTPUT_BYTES = 1 << 20
"""Maximum output of one call that a test finds in its replacement of stdout."""
MAX_ITEMS = 100_000
"""Maximum size of a global value of the solution that is copied to the judge."""
MAX_GLOBAL_CHARS = 1 << 20
"""Maximum length of its JSON."""
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); import processes; processes.main()"
"""A spawner's program. An imported file need not be compiled again."""
LAST_NAME = "__builtins__"
"""The last of the global names that exist before a program runs."""
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_SIZED = (list, tuple, set, frozenset, dict, str, bytes, bytearray)
_NUMBER = struct.Struct("i")
_PROGRAMS = struct.Struct("idd")
"""Number of descriptors of each program, its seconds, and the end of the time of all programs."""
_SIGCHLD = (_signal.SIGCHLD,)
_END = struct.Struct("ii")
FINISHED, LATE, UNSTARTED = 0, 1, 2
"""Outcomes of a program: it exited by itself, was killed at its time limit, or was not started for lack of time."""
MAX_PROGRAMS = 32
"""Maximum number of programs in one message, which holds 253 descriptors."""
GRACE_SECONDS = 10.0
"""Time for the spawner to kill a program and report it, on a busy machine."""
SWEEP_SECONDS = 1.0
"""Time limit for killing processes that a program has left running."""
BOX, FOLDERS = "/box", ("work", "tmp", "shm")
"""What a run in the sandbox can write to, as it is at the start. No other run shares it, or the process numbers."""


class Spawner:
    """Forks the processes that run the solution, one at a time.

    `folder` contains this file, and `path` is the `sys.path` of the solution. With `hidden`, no other process can
    inspect the spawner and its processes, which find nothing in `folder`. It is for code that is not the solution.
    """

    def __init__(self, folder, path, hidden=False):
        import subprocess  # not in the spawner, whose imports cost time in each judging

        self._control, theirs = socket.socketpair()
        self._running = None
        null, number = subprocess.DEVNULL, theirs.fileno()
        command = [sys.executable, "-I", "-S", "-c", _START, str(number), json.dumps([folder, *path])]
        command += ["hidden"] if hidden else []
        env = {**os.environ, "LD_BIND_NOW": "1"}  # so no forked process has to look up the functions of libraries
        with theirs:
            # Stored only to be reaped. Its answers come over the socket.
            self._process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, pass_fds=[number], env=env)

    def wait_until_ready(self, seconds):
        """Wait for a confirmation. Raises TimeoutError, or `PeerExitedError` if the spawner exited."""
        self._control.settimeout(seconds)
        self._receive()
        self._control.settimeout(None)

    def prepare(self, source, prelude, modules, seconds):
        """Load once what all processes need: the program's text, the `PRELUDE` and libraries. Called before any line of
        the solution runs. Raises TimeoutError, or `PeerExitedError` if the spawner exited."""
        import tempfile  # as above

        with tempfile.TemporaryFile() as file:
            file.write(json.dumps({"source": source, "prelude": prelude, "modules": modules}).encode())
            file.seek(0)
            socket.send_fds(self._control, [PREPARE], [file.fileno()])
            self.wait_until_ready(seconds)

    def start(self, mode, descriptors):
        """Start a process in `mode` with copies of `descriptors`, after killing a running one."""
        self.stop()
        with _block_alarm():
            socket.send_fds(self._control, [mode], descriptors)
            (self._running,) = _NUMBER.unpack(self._receive())

    def run_programs(self, programs, seconds, ends):
        """Run programs one after the other, each with its descriptors of stdin and stdout (and stderr). Yields for each
        one of `FINISHED`, `LATE` and `UNSTARTED`, and the exit status as in `os.waitstatus_to_exitcode`.

        `seconds` is the limit of each, and `ends` the end of the time of all, as in `time.monotonic`. All are sent at
        once, so that a program need not wait until the judge has read the output of the one before.
        """
        self.stop()
        header = PROGRAM + _PROGRAMS.pack(len(programs[0]), seconds, ends)
        socket.send_fds(self._control, [header], [number for program in programs for number in program])
        for _ in programs:
            self._control.settimeout(seconds + GRACE_SECONDS)
            outcome, status = _END.unpack(self._receive(_END.size))
            yield outcome, os.waitstatus_to_exitcode(status)
        self._control.settimeout(None)

    def wait(self):
        """Wait for the running process and return its exit status as in `os.waitstatus_to_exitcode`."""
        (status,) = _NUMBER.unpack(self._receive())
        self._running = None
        return os.waitstatus_to_exitcode(status)

    def stop(self):
        """Kill the running process and its descendants in the same group."""
        if self._running is None:
            return
        with _block_alarm():
            _kill_group(self._running)
            self.wait()

    def _receive(self, size=_NUMBER.size):
        data = b""
        while len(data) < size:
            part = self._control.recv(size - len(data))
            if not part:
                raise PeerExitedError("the spawner has exited")
            data += part
        return data


@contextlib.contextmanager
def _block_alarm():
    """Block the judge's alarm. After half a read message, the next one would be misread."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGALRM])
    try:
        yield
    finally:
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [_signal.SIGALRM])


def hide():
    """Prevent other processes of the same user from inspecting the memory and descriptors of this process and its
    forks. See prctl(2). Raises OSError if it has no effect."""
    import ctypes  # not needed by the spawner of the solution

    libc = ctypes.CDLL(None, use_errno=True)
    # A process that the sandbox has forked is hidden from its start.
    if libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) and libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")
    if libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0):
        raise OSError("prctl(PR_SET_DUMPABLE) has no effect")


def run_spawner(control, hidden):
    """Serve the judge. Returns in each started process: the mode, the descriptors and the prepared program."""
    os.environ.pop("LD_BIND_NOW", None)
    sys.argv = ["solution.py"]
    for name in ("exit", "quit"):
        setattr(builtins, name, _raise_exit)
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
                prepared = PreparedProgram(**_read_json(descriptors[0]))
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
    except BaseException:  # noqa: BLE001  the judge sees the end of the socket
        os._exit(1)
    os.close(control.detach())
    return mode, descriptors, prepared


def _start_programs(control, descriptors, count, seconds, ends):
    """Run a process for every `count` descriptors and report its outcome. In such a process, return its descriptors."""
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _SIGCHLD)
    is_isolated = os.path.dirname(os.getcwd()) == os.path.dirname(os.path.realpath("/tmp")) == BOX
    while descriptors:
        if is_isolated:  # without isolation these would be the host's processes and files
            kill_other_processes()
            empty_box()
        chosen, descriptors = descriptors[:count], descriptors[count:]
        left = min(seconds, ends - time.monotonic())
        pid = os.fork() if left > 0 else None
        if pid == 0:
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _SIGCHLD)
            for descriptor in descriptors:
                os.close(descriptor)
            return chosen
        for descriptor in chosen:
            os.close(descriptor)
        end = (UNSTARTED, 0) if pid is None else _wait_for_program(pid, time.monotonic() + left)
        control.sendall(_END.pack(*end))
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _SIGCHLD)
    return None


def _wait_for_program(pid, ends):
    """Wait for a program until its time is over, and kill the rest of its process group."""
    outcome = FINISHED
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        left = ends - time.monotonic()
        if left <= 0:
            outcome = LATE
            break
        _signal.sigtimedwait(_SIGCHLD, left)
    _kill_group(pid)
    return outcome, os.waitpid(pid, 0)[1]


def _kill_group(pid):
    """Kill a process and its group, if they exist and belong to this user."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, _signal.SIGKILL)


def kill_other_processes():
    """Kill what an earlier program has left running, for example in another session: all processes except the first one
    of the namespace, the judge, and those that the judge has started."""
    init, judge, me = 1, os.getppid(), os.getpid()
    ends = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < ends:
        others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in (init, judge, me)]
        left = [pid for pid in others if _read_parent(pid) not in (None, judge)]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, _signal.SIGKILL)


def _read_parent(pid):
    """Return the id of the parent process, or None if the process has exited."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent, *_ = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in (b"Z", b"X") else int(parent)


def empty_box():
    """Remove the files of earlier programs, however deep: a folder's contents are moved up before it is removed."""
    while others := [entry for entry in _list_entries(BOX) if entry.name not in FOLDERS or not _is_folder(entry)]:
        for entry in others:
            _remove(entry, BOX)
    for name in FOLDERS:
        os.makedirs(f"{BOX}/{name}", exist_ok=True)
        _empty_folder(f"{BOX}/{name}")
    os.chdir(f"{BOX}/{FOLDERS[0]}")


def _empty_folder(folder):
    while entries := _list_entries(folder):
        for entry in entries:
            _remove(entry, folder)


def _remove(entry, folder):
    """Remove a file, or a folder whose contents are moved to `folder`."""
    if not _is_folder(entry):
        os.unlink(entry.path)
        return
    for inner in _list_entries(entry.path):
        os.rename(inner.path, f"{folder}/{os.urandom(16).hex()}")
    os.rmdir(entry.path)


def _is_folder(entry):
    return entry.is_dir(follow_symlinks=False)


def _list_entries(folder):
    os.chmod(folder, 0o755)
    with os.scandir(folder) as found:
        return list(found)


def _read_json(descriptor):
    with open(descriptor, "rb") as file:
        return json.loads(file.read())


class PreparedProgram:
    """State that all processes of a solution share, loaded in the spawner. No line of the solution has run."""

    def __init__(self, source, prelude, modules):
        self.source = source
        self.program = _compile(source)
        self.assigned_names = _collect_names(self.program) if self.program else ()
        self.prelude_names: dict[str, object] = {}
        if prelude:
            exec(PRELUDE, self.prelude_names)
            sys.setrecursionlimit(RECURSION_LIMIT)
            with contextlib.suppress(AttributeError):  # a Python without this limit
                sys.set_int_max_str_digits(MAX_DIGITS)
            _raise_stack_limit()
        for name in modules:
            # The solution itself raises the error of a failed import.
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
        self.prelude_names.pop(LAST_NAME, None)
        self.globals = _add_module("__main__").__dict__
        self.globals.update(self.prelude_names, __file__="solution.py", **{LAST_NAME: builtins})
        gc.collect()
        gc.freeze()


def _compile(source):
    """Compile the program. Returns None if there is a fault, which a process of its own reports.

    Python's usual recursion limit must be in force: under it no text makes the compiler use up the C stack.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", SyntaxWarning)  # each process compiles again, so that its stderr has it
            return compile(source, "solution.py", "exec", dont_inherit=True)
    except Exception:  # noqa: BLE001  the text may be anything
        return None


def _raise_stack_limit():
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    soft = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def run_solution(mode, descriptors, prepared):
    """Run in a process group of its own, so that a signal to the group spares the judge."""
    os.setpgid(0, 0)
    if mode == MODULE:
        _serve_module(descriptors[0], prepared)
    _run_program(prepared, *descriptors)


def _raise_exit(code=None):
    """Replace ``exit`` and ``quit``, which Python has from `site`. It is not imported here."""
    raise SystemExit(code)


def _serve_module(descriptor, prepared):
    """Serve the requests of the judge. Never returns."""
    code = 1
    try:
        SolutionLink(socket.socket(fileno=descriptor), prepared.prelude_names if prepared else {}).serve()
    except PeerExitedError:
        code = 0
    finally:
        os._exit(code)


def _run_program(prepared, stdin, stdout, *stderr):
    """Run the program as `__main__`, which has read and written nothing before. Never returns."""
    for number, descriptor in enumerate((stdin, stdout, *stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    names = prepared.globals
    code, assigned = UNCAUGHT, prepared.assigned_names
    try:
        program = prepared.program
        if program is None:
            program = compile(prepared.source, "solution.py", "exec", dont_inherit=True)
            assigned = _collect_names(program)
        exec(program, names)
        code = 0
    except SystemExit as error:
        code = _convert_exit_code(error.code)
    except BaseException:  # noqa: BLE001  reported as by Python
        sys.excepthook(*sys.exc_info())
    _finish_program(names, assigned, code)


def _convert_exit_code(code):
    if code is None or isinstance(code, int):
        status = int(code or 0) & 0xFF
        return 1 if status == UNCAUGHT else status
    print(code, file=sys.stderr)
    return 1


def _finish_program(names, assigned, code):
    """Exit as the interpreter does, but without the teardown of libraries, which costs more than most programs. Names
    that existed before the program and that it does not assign are not cleared."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        _flush(sys.stdout, sys.stderr)  # these may be the program's own, and need its names
        own = {*itertools.takewhile(LAST_NAME.__ne__, reversed(names)), *assigned}
        for lasting in ((types.ModuleType, types.FunctionType, type), ()):
            for name in own:
                if not isinstance(names.get(name), lasting):
                    names.pop(name, None)  # objects before the functions of their `__del__`
        # A file that is still open writes its buffer. Without objects in the second generation, the first is enough.
        gc.collect(2 if gc.get_count()[2] else 1)
    finally:
        _flush(sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        os._exit(code)


def _flush(*streams):
    for stream in streams:
        with contextlib.suppress(Exception):  # it is closed, or an object of the program
            stream.flush()


def _collect_names(program):
    """Return the global names that the program can assign, and others."""
    found, parts = set(), [program]
    for part in parts:
        found.update(part.co_names)
        parts += [constant for constant in part.co_consts if isinstance(constant, types.CodeType)]
    return found


def _add_module(name):
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


class SolutionLink(ProcessLink):
    """The solution's end: its module, and the objects to which the judge has references."""

    def __init__(self, sock, prelude):
        """`prelude` has the names that the solution finds in its module without having defined them."""
        super().__init__(sock)
        self._module = _add_module("solution")
        self._prelude = prelude
        self._module.__dict__.update(prelude, __name__="solution")
        self._recursion_limit = sys.getrecursionlimit()
        sys.setrecursionlimit(min(self._recursion_limit, LINK_RECURSION_LIMIT))
        self._output = _OutputBuffer()
        sys.stdout = io.TextIOWrapper(self._output, "utf-8", "replace", newline="\n", write_through=True)
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
            return _find_library_object(*rest)
        if side == "iterator":
            return _iterate(self, *rest)
        return self._objects[rest[0]] if side == "solution" else TestCallable(self, rest[0])

    def take_printed(self):
        return self._output.take()

    def find_line(self, error):
        line, at = None, error.__traceback__
        while at is not None:
            line = at.tb_lineno if at.tb_frame.f_code.co_filename == "solution.py" else line
            at = at.tb_next
        return line

    def perform(self, operation, args, kwargs):
        """Perform a request under the solution's own recursion limit. A lower one holds while values are encoded."""
        outer = sys.getrecursionlimit()
        sys.setrecursionlimit(self._recursion_limit)
        try:
            if operation == "load":
                return self._load(*args)
            if operation == "eval":
                return eval(args[0], self._module.__dict__)  # noqa: S307  in the solution's process
            return OPERATIONS[operation](*args, **kwargs)
        finally:
            self._recursion_limit = sys.getrecursionlimit()
            sys.setrecursionlimit(outer)

    def _load(self, text):
        """Run the solution. Returns its global names without modules: ``[name, kind, JSON of the value]``."""
        names = self._module.__dict__
        exec(compile(text, "solution.py", "exec"), names)
        return [
            [name, *self._describe_global(value)]
            for name, value in names.items()
            if not name.startswith("__") and not isinstance(value, types.ModuleType)
            if name not in self._prelude or self._prelude[name] is not value
        ]

    def _describe_global(self, value):
        """Return kind and JSON. A large value is sent by reference: copying a table of primes takes long."""
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == "solution":
            return "exception", json.dumps([kind.__name__ for kind in value.__mro__])
        text = ""
        if type(value) not in _SIZED or len(value) <= MAX_ITEMS:
            with contextlib.suppress(RecursionError):  # it contains itself
                text = json.dumps(encode(value, self.refer))
        return "value", text if 0 < len(text) < MAX_GLOBAL_CHARS else json.dumps(self.refer(value))


class TestCallable:
    """A function of the test, as the solution sees it."""

    def __init__(self, link, number):
        self.link = link
        self.number = number

    def __call__(self, *args, **kwargs):
        return self.link.ask("call", self.number, *args, **kwargs)


def _iterate(link, number):
    """Yield the items of an iterator of the test. A generator, so that a ``for`` and `next` work."""
    while True:
        more, value = link.ask("next", number)
        if not more:
            return
        yield value


class _OutputBuffer(io.BytesIO):
    """The beginning of what the solution prints in a call, for the judge."""

    def fileno(self):
        return 1

    def write(self, data):
        if self.tell() < MAX_OUTPUT_BYTES:
            super().write(data)
        return len(data)

    def take(self):
        """Return what was written since the last call."""
        if not self.tell():
            return ""
        text = self.getvalue()[:MAX_OUTPUT_BYTES].decode("utf-8", "replace")
        self.seek(0)
        self.truncate()
        return text


def _find_library_object(home, path):
    """Return a function or a class of Python's that a test has passed."""
    return operator.attrgetter(path)(importlib.import_module(home))


def _list_items(value, max_items):
    """List the items of a container. Returns None if it is none, or has more than `max_items`."""
    try:
        items = list(itertools.islice(iter(value), max_items + 1))
    except Exception:  # noqa: BLE001  a method of the solution
        return None
    return items if len(items) <= max_items else None


def _replace(operation, owner, key, state):
    """Bring a container in an object into a state."""
    container = OPERATIONS[operation](owner, key)
    if isinstance(container, CONTAINERS):
        update(container, state)


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
    "list": _list_items,
    "next": take_next,
    "len": len,
    "str": str,
    "repr": repr,
}


def main():
    """Run a spawner."""
    run_solution(*run_spawner(socket.socket(fileno=int(sys.argv[1])), "hidden" in sys.argv[3:]))
