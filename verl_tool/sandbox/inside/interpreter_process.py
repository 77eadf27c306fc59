"""The Python state of a session, kept as a process: the *keeper*.

For each cell the keeper forks. The fork runs the cell; if that comes to its end, even by an exception, the fork is the
next keeper, and the old one ends. If the fork dies, or the pool cancels the cell, the old keeper kills all that the
cell has started, and stands: the state is what it was before the cell. It tells the pool which of the two happened.

The fork inherits open files, so that positions in them and their locks (which are lost) are not rolled back. It is the
session's only process when the cell has ended: threads and processes that the cell left are ended and counted.
The user's code has run in this process. What it may break here is its own session, and the pool believes nothing of it
that could harm another.
"""

from __future__ import annotations

import _signal
import _socket
import ast
import contextlib
import io
import linecache
import mmap
import os
import resource
import select
import sys
import time
import traceback

from . import linux, program, streams, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Coroutine
    from typing import NoReturn

    from .policy_hooks import PolicyHooks

_IS_COROUTINE = 0x80
"""Of a code object's flags (inspect.CO_COROUTINE)."""
_JOURNAL = linux.ctypes.c_char * wire.JOURNAL_BYTES
_TOKEN_BYTES = 16
"""Of what a cell's process says when it takes over: something that no code says by chance that finds the socket."""
_WALL = 0x40000000
"""Option of waitpid(2), also known as __WALL: children of every kind."""
_BURIAL_SECONDS = 0.5
"""For what was killed after a cell, and for the keeper before, to be gone: else the next cell would be told of it."""
_FORK_SECONDS = 2.0
"""For the kernel to bury what was killed, so that there is room for a fork."""
_NO_PROCESS = b"The cell was not run: the processes that are running leave no room for one more. End some of them.\n"
_RESERVE_BYTES = 4 << 20
"""Kept free between cells: else one that fills the session's memory leaves no room for another that lets go of it."""
_NO_MEMORY = b"The cell was undone: it left no memory for the next one.\n"
_kill, _exit, _fork, _write, _mmap = os.kill, os._exit, os.fork, os.write, mmap.mmap


def keep(main: types.ModuleType, hooks: PolicyHooks) -> NoReturn:
    """Be the first keeper of a session, and all that follow. The channel to the pool is file descriptor 0."""
    channel = _socket.socket(fileno=os.dup(0))
    _forget_streams()
    main.__dict__.pop("__file__", None)
    sys.argv, sys.path[0] = [""], ""
    sys.excepthook = _show_error
    program.guarded(lambda: hooks.activate(main))
    InterpreterProcess(channel, main).serve()


class InterpreterProcess:
    """Serves one session; in each fork that becomes the keeper, the same object goes on."""

    def __init__(self, channel: _socket.socket, main: types.ModuleType) -> None:
        self._channel = channel
        self._main = main
        self._spared: set[int] = set()
        """Other keepers in the same pid namespace: those of branches."""
        self._mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        """Signals that the user's code blocks."""
        self._reserve = _reserve()

    def serve(self) -> NoReturn:
        """Run cells until the pool lets go of the session."""
        self._greet()
        while True:
            message, fds = linux.recv_fds(self._channel, 1 << 16, wire.MAX_FDS)
            if not message:
                _exit(0)
            op, number, room, interactive, output = wire.CELL.unpack_from(message)
            self._spared = {pid for (pid,) in wire.PID.iter_unpack(message[wire.CELL.size :])}
            if op == wire.OP_CELL:
                self._cell(number, fds, room, bool(interactive), output)
            elif op == wire.OP_FORK:
                self._branch(number, fds)

    def _greet(self) -> None:
        box = os.open(wire.BOX, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        linux.send_fds(self._channel, wire.DONE.pack(wire.READY, 0, 0, 0, 0, 0, os.getpid()), [box])
        os.close(box)

    def _branch(self, number: int, fds: list[int]) -> None:
        """Make a second keeper of the same state, in the copy of the folders that it was given."""
        try:
            pid = self._fork()
        except BlockingIOError:
            pid = -1  # the pool sees that nobody holds the new channel
        if pid:
            _close(fds)
            return
        self._channel.close()
        self._channel = _socket.socket(fileno=fds[0])
        own = f"{wire.BOX}/{wire.BRANCH_FOLDER.format(number=number, name='work')}"
        try:
            beneath = os.path.relpath(os.getcwd(), wire.WORK_DIRECTORY)
            os.chdir(own if beneath.startswith("..") else os.path.join(own, beneath))
        except OSError:  # its folder was removed
            os.chdir(own)
        self._greet()

    def _cell(self, number: int, fds: list[int], shown: int, interactive: bool, output: int) -> None:
        """Return in the process that is the keeper afterwards."""
        _wait_for_the_end_of_all_but({1, os.getpid()} | self._spared)
        local, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        keeper, token = os.getpid(), os.urandom(_TOKEN_BYTES)
        try:
            pid = self._fork()
        except BlockingIOError:
            self._reject(number, fds)
            return
        if pid:
            theirs.close()
            _close(fds)
            self._watch(pid, local, token, number)
            return
        try:
            local.close()
            self._channel.close()
            own = os.getpid()
            status, threads = self._run(fds, shown, interactive, output)
            self._take_over(theirs, token)
            others = _end_all_others(keeper, own, self._spared)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            self._channel.send(wire.DONE.pack(wire.PRESERVED, number, status, threads, others, peak, os.getpid()))
        except MemoryError:
            try:
                _write(2, _NO_MEMORY)
            finally:
                _exit(125)
        except BaseException:  # noqa: BLE001  (the user's code may have left anything in our way)
            _exit(125)

    def _fork(self) -> int:
        """Fork without what Python does after it: random numbers, for one, go on as they were. Raises BlockingIOError
        if the session's processes leave no room for another."""
        waiting = select.poll()
        waiting.register(self._channel, select.POLLIN)
        deadline = time.monotonic() + _FORK_SECONDS
        while True:
            try:
                return linux.fork()
            except BlockingIOError:
                if waiting.poll(10) or time.monotonic() > deadline:  # or the cell is cancelled
                    raise

    def _reject(self, number: int, fds: list[int]) -> None:
        with contextlib.suppress(OSError):  # its disk may be full
            os.write(fds[2], _NO_PROCESS)
        _close(fds)
        self._channel.send(wire.DONE.pack(wire.UNDONE, number, 1 << 8, 0, 0, 0, os.getpid()))

    def _watch(self, pid: int, ours: _socket.socket, token: bytes, number: int) -> None:
        """Stand by while the process `pid` runs a cell: hand over to it, or see to its end."""
        process = os.pidfd_open(pid)
        poll = select.poll()
        for each in (self._channel, ours, process):
            poll.register(each, select.POLLIN)
        cancelled = closed = False
        while not (cancelled or closed):
            ready = {fd for fd, _ in poll.poll()}
            if ours.fileno() in ready:
                message = ours.recv(_TOKEN_BYTES)
                if message == token:
                    linux.send_fds(ours, b"c", [self._channel.fileno()])
                    _exit(0)
                if not message:
                    poll.unregister(ours)
            elif process in ready:
                break
            elif self._channel.fileno() in ready:
                message = self._channel.recv(1 << 16)
                closed = not message
                cancelled = not closed and wire.CELL.unpack_from(message)[:2] == (wire.OP_CANCEL, number)
        _kill_all_but(self._spared)
        if closed:
            _exit(0)
        _, status = os.waitpid(pid, 0)
        os.close(process)
        ours.close()
        self._channel.send(wire.DONE.pack(wire.UNDONE, number, status, 0, 0, 0, os.getpid()))

    def _run(self, fds: list[int], shown: int, interactive: bool, output: int) -> tuple[int, int]:
        """Run a cell in this process, a fork for it. Return the exit code, and how many threads were left."""
        os.setsid()  # signals to the cell's group do not reach the keeper
        self._reserve.close()
        code = program.read_job(fds[0]).code
        journal = linux.map_shared(fds[0], _JOURNAL)
        words = journal.cast("Q")
        if len(fds) == 3:
            fds.append(os.open(os.devnull, os.O_RDONLY))
        for fd, number_there in zip(fds[1:], (1, 2, 0), strict=True):
            os.dup2(fd, number_there)
        _close(fds)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="replace")
        streams.reopen()
        streams.attach(streams.Journal(words), output)
        words[wire.STATE] = wire.STARTED
        threading = sys.modules.get("threading")
        if threading is not None:
            threading.main_thread()._set_native_id()
        _signal.pthread_sigmask(_signal.SIG_SETMASK, self._mask)
        status = program.guarded(lambda: run_cell(code, self._main, shown, interactive))
        self._mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        _flush_streams()
        self._reserve = _reserve()
        threads = len(os.listdir("/proc/self/task")) - 1
        if threads:
            _leave_threads()
        _forget_streams()
        words.release()
        linux.unmap(journal)
        return status, threads

    def _take_over(self, theirs: _socket.socket, token: bytes) -> None:
        """Become the keeper. Raises OSError if the one before is gone: the pool then holds the state for lost."""
        theirs.send(token)
        _, fds = linux.recv_fds(theirs, 1, 1)
        if not fds:
            raise OSError("the keeper is gone")
        theirs.close()
        self._channel = _socket.socket(fileno=fds[0])


def _reserve() -> mmap.mmap:
    """Raises MemoryError if there is no room for it: a cell is then undone."""
    try:
        return _mmap(-1, _RESERVE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError from None


def run_cell(code: bytes, main: types.ModuleType, shown: int, interactive: bool) -> None:
    """Run a cell's code in the module `main`.

    `shown`: its number in tracebacks; 0: it has none.
    `interactive`: await is allowed at the top level, and the value of a last expression goes to `sys.displayhook`,
    which prints it unless it is None.
    """
    name = f"<cell {shown}>" if shown else "<cell>"
    text = code.decode("utf-8", "replace")
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    run = eval  # which the cell may replace
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if interactive else 0
    tree = compile(code, name, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    last = tree.body.pop() if interactive and tree.body and isinstance(tree.body[-1], ast.Expr) else None
    compiled = compile(tree, name, "exec", flags, dont_inherit=True)
    _finished(run(compiled, main.__dict__), compiled)
    if isinstance(last, ast.Expr):
        compiled = compile(ast.Expression(last.value), name, "eval", flags, dont_inherit=True)
        value = _finished(run(compiled, main.__dict__), compiled)
        sys.displayhook(value)


def _finished(value: object, code: types.CodeType) -> object:
    """What code gave, after waiting for it if it awaits something at its top level."""
    if not code.co_flags & _IS_COROUTINE:
        return value
    import asyncio

    async def wait(awaitable: Coroutine) -> object:
        return await awaitable

    return asyncio.run(wait(value))  # type: ignore[arg-type]


def _show_error(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """As Python's own hook, which does not find the source of cells."""
    traceback.print_exception(kind, error, trace)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001  (anything may have been put in the place of them)
            continue
    for fd in (1, 2):
        streams.flush(fd)


def _forget_streams() -> None:
    """Let go of a cell's input and output: what is written between cells goes nowhere."""
    streams.attach(None, 0)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if null > 2:  # else a cell has closed one of them
        os.close(null)
    for fd in (1, 2):
        streams.flush(fd)  # what could not be written is not the next cell's


def _leave_threads() -> None:
    """Go on in a fork, which has none of the other threads; the process that has them is ended with the others."""
    random = sys.modules.get("random")
    state = random.getstate() if random is not None else None
    if _fork():
        while True:
            _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
            select.poll().poll()
    if random is not None:
        random.setstate(state)  # Python seeds it anew after a fork


def _end_all_others(keeper: int, own: int, spared: set[int]) -> int:
    """Kill all other processes of the session's Python but `spared`: also the `keeper` before, and the one that ran the
    cell. Return how many others the cell had left."""
    left = len(_live_but({1, os.getpid(), keeper, own} | spared))
    if left or own != os.getpid():
        _kill_all_but(spared)
    try:
        while True:
            os.waitpid(-1, _WALL)
    except ChildProcessError:
        return left


def _kill_all_but(spared: set[int]) -> None:
    """Kill all processes of the pid namespace but its pid 1, this one, and other branches' keepers."""
    deadline = time.monotonic() + _FORK_SECONDS
    while spared and time.monotonic() < deadline:
        others = _live_but({1, os.getpid()} | spared)
        if not others:
            return
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                _kill(pid, _signal.SIGKILL)
        time.sleep(0.001)
    _kill(-1, _signal.SIGKILL)  # nothing that forks can evade this one


def _wait_for_the_end_of_all_but(known: set[int]) -> None:
    deadline = time.monotonic() + _BURIAL_SECONDS
    while _live_but(known) and time.monotonic() < deadline:
        time.sleep(0.001)


def _live_but(known: set[int]) -> list[int]:
    found = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in known]
    return [pid for pid in found if _lives(pid)]


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(4096).rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
