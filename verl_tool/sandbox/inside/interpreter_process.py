"""The *interpreter process*, which contains the Python state of a session.

It forks for each cell. If the cell finishes, even by an exception, the fork becomes the interpreter process, and the
old one exits. If the fork dies, or the pool cancels the cell, the old process kills everything that the cell started
and continues, so the state is rolled back. The pool is notified of the outcome.

The fork inherits open files, so their positions and locks (which are lost) are not rolled back. After a cell it is the
session's only process: threads and processes that the cell left are killed and counted. The user's code has run in
this process. It can only damage its own session, and the pool trusts nothing from it that could harm another.
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
"""Flag of a code object (inspect.CO_COROUTINE)."""
_JOURNAL = linux.ctypes.c_char * wire.JOURNAL_BYTES
_TOKEN_BYTES = 16
"""Length of the token by which a cell's process takes over. Other code that finds the socket cannot guess it."""
_WALL = 0x40000000
"""Option of waitpid(2), also known as __WALL: children of every kind."""
_REAP_SECONDS = 0.5
"""Time for killed processes and the old interpreter process to exit, so that the next cell does not report them."""
_FORK_SECONDS = 2.0
"""Time for the kernel to reap killed processes, so that a fork is within the process limit."""
_NO_PROCESS = b"The cell was not run: the limit of processes is reached. Terminate some of them.\n"
_RESERVE_BYTES = 4 << 20
"""Memory reserved between cells, so that after a cell that fills the session's memory another can release it."""
_NO_MEMORY = b"The cell was rolled back: it left no memory for the next one.\n"
_kill, _exit, _fork, _write, _mmap = os.kill, os._exit, os.fork, os.write, mmap.mmap


def serve_session(main: types.ModuleType, hooks: PolicyHooks) -> NoReturn:
    """Run the cells of a session. File descriptor 0 is the channel to the pool."""
    channel = _socket.socket(fileno=os.dup(0))
    _detach_streams()
    main.__dict__.pop("__file__", None)
    sys.argv, sys.path[0] = [""], ""
    sys.excepthook = _print_error
    program.run_guarded(lambda: hooks.activate(main))
    InterpreterProcess(channel, main).serve()


class InterpreterProcess:
    """Serves one session. The same object continues in each fork that takes over."""

    def __init__(self, channel: _socket.socket, main: types.ModuleType) -> None:
        self._channel = channel
        self._main = main
        self._branches: set[int] = set()
        """Process ids of the session's branches, which share the pid namespace."""
        self._mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        """Signals that the user's code has blocked."""
        self._reserve = _allocate_reserve()

    def serve(self) -> NoReturn:
        """Run cells until the pool closes the session."""
        self._send_ready()
        while True:
            message, fds = linux.recv_fds(self._channel, 1 << 16, wire.MAX_FDS)
            if not message:
                _exit(0)
            op, number, display_number, interactive, output = wire.CELL.unpack_from(message)
            self._branches = {pid for (pid,) in wire.PID.iter_unpack(message[wire.CELL.size :])}
            if op == wire.OP_CELL:
                self._run_in_fork(number, fds, display_number, bool(interactive), output)
            elif op == wire.OP_FORK:
                self._fork_branch(number, fds)

    def _send_ready(self) -> None:
        box = os.open(wire.BOX, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        linux.send_fds(self._channel, wire.DONE.pack(wire.READY, 0, 0, 0, 0, 0, os.getpid()), [box])
        os.close(box)

    def _fork_branch(self, number: int, fds: list[int]) -> None:
        """Fork a process with the same state, in the copy of the folders for the branch."""
        try:
            pid = self._fork()
        except BlockingIOError:
            pid = -1  # the pool sees that the new channel is closed
        if pid:
            _close_all(fds)
            return
        self._channel.close()
        self._channel = _socket.socket(fileno=fds[0])
        folder = f"{wire.BOX}/{wire.BRANCH_FOLDER.format(number=number, name='work')}"
        try:
            relative = os.path.relpath(os.getcwd(), wire.WORK_DIRECTORY)
            os.chdir(folder if relative.startswith("..") else os.path.join(folder, relative))
        except OSError:  # its folder was removed
            os.chdir(folder)
        self._send_ready()

    def _run_in_fork(self, number: int, fds: list[int], display_number: int, interactive: bool, output: int) -> None:
        """Run a cell. Returns in the process that has the state afterwards."""
        _wait_for_exit_of_all_except({1, os.getpid()} | self._branches)
        parent_end, cell_end = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        parent, token = os.getpid(), os.urandom(_TOKEN_BYTES)
        try:
            pid = self._fork()
        except BlockingIOError:
            self._reject(number, fds)
            return
        if pid:
            cell_end.close()
            _close_all(fds)
            self._supervise(pid, parent_end, token, number)
            return
        try:
            parent_end.close()
            self._channel.close()
            cell = os.getpid()
            status, threads = self._execute(fds, display_number, interactive, output)
            self._take_over(cell_end, token)
            others = _kill_leftovers(parent, cell, self._branches)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            self._channel.send(wire.DONE.pack(wire.PRESERVED, number, status, threads, others, peak, os.getpid()))
        except MemoryError:
            try:
                _write(2, _NO_MEMORY)
            finally:
                _exit(125)
        except BaseException:  # noqa: BLE001  (the user's code may have changed anything)
            _exit(125)

    def _fork(self) -> int:
        """Fork without Python's hooks, so that random states continue, for example. Raises BlockingIOError at the limit
        of processes."""
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
        _close_all(fds)
        self._channel.send(wire.DONE.pack(wire.UNDONE, number, 1 << 8, 0, 0, 0, os.getpid()))

    def _supervise(self, pid: int, parent_end: _socket.socket, token: bytes, number: int) -> None:
        """Wait while the process `pid` runs a cell, and then hand over to it or kill it."""
        process = os.pidfd_open(pid)
        poll = select.poll()
        for each in (self._channel, parent_end, process):
            poll.register(each, select.POLLIN)
        cancelled = closed = False
        while not (cancelled or closed):
            ready = {fd for fd, _ in poll.poll()}
            if parent_end.fileno() in ready:
                message = parent_end.recv(_TOKEN_BYTES)
                if message == token:
                    linux.send_fds(parent_end, b"c", [self._channel.fileno()])
                    _exit(0)
                if not message:
                    poll.unregister(parent_end)
            elif process in ready:
                break
            elif self._channel.fileno() in ready:
                message = self._channel.recv(1 << 16)
                closed = not message
                cancelled = not closed and wire.CELL.unpack_from(message)[:2] == (wire.OP_CANCEL, number)
        _kill_all_except(self._branches)
        if closed:
            _exit(0)
        _, status = os.waitpid(pid, 0)
        os.close(process)
        parent_end.close()
        self._channel.send(wire.DONE.pack(wire.UNDONE, number, status, 0, 0, 0, os.getpid()))

    def _execute(self, fds: list[int], display_number: int, interactive: bool, output: int) -> tuple[int, int]:
        """Run a cell in this forked process. Returns the exit code and the number of threads that it left."""
        os.setsid()  # signals to the cell's group do not reach the parent
        self._reserve.close()
        code = program.read_job(fds[0]).code
        journal = linux.map_shared(fds[0], _JOURNAL)
        words = journal.cast("Q")
        if len(fds) == 3:
            fds.append(os.open(os.devnull, os.O_RDONLY))
        for fd, target in zip(fds[1:], (1, 2, 0), strict=True):
            os.dup2(fd, target)
        _close_all(fds)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="replace")
        streams.reopen()
        streams.attach(streams.Journal(words), output)
        words[wire.STATE] = wire.STARTED
        threading = sys.modules.get("threading")
        if threading is not None:
            threading.main_thread()._set_native_id()
        _signal.pthread_sigmask(_signal.SIG_SETMASK, self._mask)
        status = program.run_guarded(lambda: run_cell(code, self._main, display_number, interactive))
        self._mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        _flush_streams()
        self._reserve = _allocate_reserve()
        threads = len(os.listdir("/proc/self/task")) - 1
        if threads:
            _abandon_threads()
        _detach_streams()
        words.release()
        linux.unmap(journal)
        return status, threads

    def _take_over(self, cell_end: _socket.socket, token: bytes) -> None:
        """Take the channel from the old process. Raises OSError if it has exited; the state is then lost."""
        cell_end.send(token)
        _, fds = linux.recv_fds(cell_end, 1, 1)
        if not fds:
            raise OSError("the interpreter process has exited")
        cell_end.close()
        self._channel = _socket.socket(fileno=fds[0])


def _allocate_reserve() -> mmap.mmap:
    """Allocate the reserve. Raises MemoryError if that fails; the cell is then rolled back."""
    try:
        return _mmap(-1, _RESERVE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError from None


def run_cell(code: bytes, main: types.ModuleType, display_number: int, interactive: bool) -> None:
    """Run a cell's code in the module `main`.

    `display_number` is the cell's number in tracebacks; 0 for none. If `interactive`, await is allowed at the top
    level, and the value of a last expression goes to `sys.displayhook`, which prints it unless it is None.
    """
    name = f"<cell {display_number}>" if display_number else "<cell>"
    text = code.decode("utf-8", "replace")
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    run = eval  # the cell may replace the builtin
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if interactive else 0
    tree = compile(code, name, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    last = tree.body.pop() if interactive and tree.body and isinstance(tree.body[-1], ast.Expr) else None
    compiled = compile(tree, name, "exec", flags, dont_inherit=True)
    _await_result(run(compiled, main.__dict__), compiled)
    if isinstance(last, ast.Expr):
        compiled = compile(ast.Expression(last.value), name, "eval", flags, dont_inherit=True)
        value = _await_result(run(compiled, main.__dict__), compiled)
        sys.displayhook(value)


def _await_result(value: object, code: types.CodeType) -> object:
    """Return the value of evaluated code, awaited if the code has await at its top level."""
    if not code.co_flags & _IS_COROUTINE:
        return value
    import asyncio

    async def wait(awaitable: Coroutine) -> object:
        return await awaitable

    return asyncio.run(wait(value))  # type: ignore[arg-type]


def _print_error(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Replace Python's hook, which does not find the source of cells."""
    traceback.print_exception(kind, error, trace)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001  (the user's code may have replaced them)
            continue
    for fd in (1, 2):
        streams.flush(fd)


def _detach_streams() -> None:
    """Release a cell's input and output. Text written between cells is discarded."""
    streams.attach(None, 0)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if null > 2:  # otherwise a cell has closed one of them
        os.close(null)
    for fd in (1, 2):
        streams.flush(fd)  # the next cell must not write what remains


def _abandon_threads() -> None:
    """Continue in a fork, which has no other threads. The process with the threads is killed later, with the others."""
    random = sys.modules.get("random")
    state = random.getstate() if random is not None else None
    if _fork():
        while True:
            _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
            select.poll().poll()
    if random is not None:
        random.setstate(state)  # Python reseeds it after a fork


def _kill_leftovers(parent: int, cell: int, branches: set[int]) -> int:
    """Kill all other processes of the interpreter except `branches`, including `parent`, the old interpreter process,
    and `cell`, which ran the cell. Return how many others the cell left."""
    left = len(_find_live_except({1, os.getpid(), parent, cell} | branches))
    if left or cell != os.getpid():
        _kill_all_except(branches)
    try:
        while True:
            os.waitpid(-1, _WALL)
    except ChildProcessError:
        return left


def _kill_all_except(branches: set[int]) -> None:
    """Kill all processes of the pid namespace except pid 1, this one and other branches."""
    deadline = time.monotonic() + _FORK_SECONDS
    while branches and time.monotonic() < deadline:
        others = _find_live_except({1, os.getpid()} | branches)
        if not others:
            return
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                _kill(pid, _signal.SIGKILL)
        time.sleep(0.001)
    _kill(-1, _signal.SIGKILL)  # cannot be evaded by forking


def _wait_for_exit_of_all_except(known: set[int]) -> None:
    deadline = time.monotonic() + _REAP_SECONDS
    while _find_live_except(known) and time.monotonic() < deadline:
        time.sleep(0.001)


def _find_live_except(known: set[int]) -> list[int]:
    found = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in known]
    return [pid for pid in found if _is_alive(pid)]


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(4096).rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
