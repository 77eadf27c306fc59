"""Cells of Python in a container, run by the container's own python3 (3.10 or newer): standard library only, no import
of this project.

The first process reads requests from stdin and answers them on stdout; no cell runs in it. The *state* is a child of
its. For each cell the state forks: the fork runs the cell and is the state from then on, and the one before it ends. If
the fork dies before the cell's end, the one before it stands: variables are what they were before the cell.
"""

import ast
import base64
import contextlib
import io
import json
import linecache
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
import types

LENGTH = struct.Struct(">I")
START_SECONDS = 10.0
"""For the state to fork; a cell's own time begins then."""
DIE_SECONDS = 5.0
_COROUTINE = 0x80
_NO_MEMORY = b"The cell was not run: the limit of processes is reached. Terminate some of them.\n"
_run = eval


def serve():
    """Answer requests until stdin ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    channel, number = None, 0
    while True:
        head = requests.read(LENGTH.size)
        if len(head) < LENGTH.size:
            os._exit(0)
        request = json.loads(requests.read(LENGTH.unpack(head)[0]))
        if channel is None:
            channel = _new_state([requests.fileno(), answers.fileno(), null])
        number += request["counted"]
        answer = _answer(channel, request, number if request["counted"] else 0)
        if answer["state"] == "lost":
            channel.close()
            channel = None
        body = json.dumps(answer).encode()
        answers.write(LENGTH.pack(len(body)) + body)
        answers.flush()
        _bury()


def _bury():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _new_state(private):
    local, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        local.close()
        for fd in private:
            os.close(fd)
        State(theirs).keep()
    theirs.close()
    return local


def _answer(channel, request, number):
    files = [os.memfd_create(name) for name in ("code", "stdin", "stdout", "stderr")]
    try:
        for fd, text in zip(files, (request["code"], request["stdin"]), strict=False):
            content = base64.b64decode(text)
            while content:
                content = content[os.write(fd, content) :]
            os.lseek(fd, 0, os.SEEK_SET)
        started = time.monotonic()
        try:
            socket.send_fds(channel, [b"%d %d" % (number, request["interactive"])], files)
            end = _end_of(channel, request["seconds"])
        except OSError:
            end = {"state": "lost", "timed_out": False}
        end["wall_seconds"] = time.monotonic() - started
        for fd, name in zip(files[2:], ("stdout", "stderr"), strict=False):
            end[name] = base64.b64encode(os.pread(fd, request["output_bytes"], 0)).decode()
            end[name + "_bytes"] = os.fstat(fd).st_size
        return end
    finally:
        for fd in files:
            os.close(fd)


def _end_of(channel, seconds):
    """Wait for a cell; end it after so many seconds."""
    pid, timed_out, deadline = 0, False, time.monotonic() + START_SECONDS
    while True:
        left = max(0.0, deadline - time.monotonic())
        if not select.select([channel], [], [], left)[0]:
            if timed_out or not pid:
                return {"state": "lost", "timed_out": True}
            timed_out, deadline = True, time.monotonic() + DIE_SECONDS
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            continue
        kind, _, rest = channel.recv(64).partition(b" ")
        if kind == b"pid":
            pid, deadline = int(rest), time.monotonic() + seconds
        elif kind == b"kept":
            status, threads = map(int, rest.split())
            return {"state": "kept", "timed_out": False, "exit_code": status, "threads": threads}
        elif kind == b"undone":
            return {"state": "rolled_back", "timed_out": timed_out, "wait_status": int(rest)}
        else:
            return {"state": "lost", "timed_out": timed_out}


class State:
    """The Python state; in each fork that becomes the state, the same object goes on."""

    def __init__(self, channel):
        self._channel = channel
        self._main = sys.modules["__main__"] = types.ModuleType("__main__")
        self._main.__dict__["__builtins__"] = __builtins__
        sys.argv = [""]
        sys.excepthook = lambda kind, error, trace: traceback.print_exception(kind, error, trace)

    def keep(self):
        """Run cells until the first process ends."""
        while True:
            message, fds, _, _ = socket.recv_fds(self._channel, 64, 4)
            if not message:
                os._exit(0)
            number, interactive = map(int, message.split())
            self._cell(number, fds, bool(interactive))

    def _cell(self, number, fds, interactive):
        """Return in the process that is the state afterwards."""
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.write(fds[3], _NO_MEMORY)
            for fd in (*fds, reader, writer):
                os.close(fd)
            self._channel.send(b"undone %d" % (1 << 8))
            return
        if pid:
            os.close(writer)
            for fd in fds:
                os.close(fd)
            self._watch(pid, reader)
            os.close(reader)
            return
        try:
            os.close(reader)
            os.setsid()
            self._channel.send(b"pid %d" % os.getpid())
            with os.fdopen(fds[0], "rb") as file:
                code = file.read()
            for fd, number_there in zip(fds[1:], (0, 1, 2), strict=False):
                os.dup2(fd, number_there)
                os.close(fd)
            sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8", errors="replace")
            sys.stdout, sys.stderr = _text(1), _text(2)
            status = _guarded(lambda: run_cell(code, self._main, number, interactive))
            threads = len(os.listdir("/proc/self/task")) - 1
            before = os.getpid()
            if threads and os.fork():
                while True:
                    signal.pause()
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.close(null)
            os.write(writer, b"k")
            os.close(writer)
            if threads:
                os.kill(before, signal.SIGKILL)
            self._channel.send(b"kept %d %d" % (status, threads))
        except BaseException:  # noqa: BLE001  (the cell's code may have left anything in our way)
            os._exit(125)

    def _watch(self, pid, reader):
        """Stand by while the process `pid` runs a cell: end when it takes over, else see to its end."""
        process = os.pidfd_open(pid)
        watched = [process, reader]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if reader in ready:
                if os.read(reader, 1) == b"k":
                    os._exit(0)
                watched = [process]
            if process in ready:
                break
        os.close(process)
        _, status = os.waitpid(pid, 0)
        self._channel.send(b"undone %d" % status)


def _text(fd):
    buffer = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def run_cell(code, main, number, interactive):
    """Run a cell's code in the module `main`. `interactive`: await at the top level, and the last value is shown."""
    name = f"<cell {number}>" if number else "<cell>"
    text = code.decode("utf-8", "replace")
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if interactive else 0
    tree = compile(code, name, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    last = tree.body.pop() if interactive and tree.body and isinstance(tree.body[-1], ast.Expr) else None
    _finished(compile(tree, name, "exec", flags, dont_inherit=True), main)
    if last is not None:
        sys.displayhook(_finished(compile(ast.Expression(last.value), name, "eval", flags, dont_inherit=True), main))


def _finished(code, main):
    value = _run(code, main.__dict__)
    if not code.co_flags & _COROUTINE:
        return value
    import asyncio

    async def wait():
        return await value

    return asyncio.run(wait())


def _guarded(work):
    """The exit code of `work`, whose exception is shown without the frames of this file."""
    status = 0
    try:
        work()
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        status = (error.code if isinstance(error.code, int) else error.code is not None) & 0xFF
    except BaseException as error:  # noqa: BLE001  (anybody's code)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == _guarded.__code__.co_filename:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001  (anything may have been put in the place of them)
            continue
    return status


if __name__ == "__main__":
    serve()
