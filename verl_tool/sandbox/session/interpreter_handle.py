"""The pool's side of a session's Python state, a process that forks for each cell (`inside.interpreter_process`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.isolation.cgroup import RunGroup
from verl_tool.sandbox.job import JobFiles
from verl_tool.sandbox.limits import SessionLimits
from verl_tool.sandbox.worker import RunStatus, Worker

START_SECONDS = 20.0
_CANCEL_SECONDS = 1.0
"""Time for the interpreter process to roll back a cell. After it, the process is killed and the state is lost."""
ANSWER_SECONDS = 20.0
"""Time for a forkserver on an overloaded machine to end a run."""


class InterpreterExitedError(Exception):
    """The process with the Python state has exited."""


class Done(NamedTuple):
    """An interpreter's report about a cell. For the fields see `wire.DONE`."""

    outcome: int
    number: int
    status: int
    threads: int
    processes: int
    peak_bytes: int
    pid: int


class InterpreterHandle:
    """The Python state of one session. Its messages come from a process that ran user code, and are not trusted."""

    def __init__(self, limits: SessionLimits, others: Callable[[], Iterable[InterpreterHandle]]) -> None:
        """Store the settings. `others` returns the handles of its branches, which may share its pid namespace."""
        self._limits, self._others = limits, others
        self._worker: Worker | None = None
        self.run_id = 0
        """Id of the run that contains it and its branches."""
        self.ended: asyncio.Future[RunStatus] | None = None
        """End of that run, None if there is no run."""
        self.pid = 0
        """Process id in its pid namespace."""
        self.limit_hit: int = wire.NO_LIMIT
        """The limit for which the last cell was undone."""
        self.died_idle = False
        self._channel: socket.socket | None = None
        self._answer: asyncio.Future[Done] | None = None
        self._folder = -1
        self._cells = self._run_cells = 0
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def alive(self) -> bool:
        """Whether it is connected, and so accepts cells."""
        return self._channel is not None

    @property
    def lost_a_cell(self) -> bool:
        """Whether it exited during the last cell."""
        return self._answer is not None and self._answer.done() and self._answer.exception() is not None

    async def start(self, worker: Worker, job: JobFiles, group: RunGroup | None, box: int) -> int:
        """Start a fresh interpreter on the session's `worker`, with the files of `job`.

        Returns a descriptor of its box's folder, which the caller closes. `group` and `box` are those of
        `Worker.begin`. With `box` 0, a new box is made, whose number is `run_id`.

        Raises WorkerExitedError if the forkserver has exited, and InterpreterExitedError if the interpreter did not
        start; call `reap` then.
        """
        local, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            streams = (*job.fds[1:3], theirs.fileno())
            try:
                self.run_id, self.ended = worker.begin(job, self._limits, False, group, wire.INTERPRETER, box, streams)
            except BaseException:
                local.close()
                raise
        self._worker = worker
        self.ended.add_done_callback(ignore)
        self._answer = self._listen(local)
        self._timers.append(asyncio.get_running_loop().call_later(START_SECONDS, self.kill))
        try:
            self.pid = (await self._answer).pid
        finally:
            self._stop_timers()
        folder, self._folder = self._folder, -1
        return folder

    async def fork(self, branch: InterpreterHandle, number: int) -> None:
        """Fork the state into `branch`, which must not be started. `number` is that of the branch and of its folders.

        Raises InterpreterExitedError if it does not start.
        """
        local, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        branch._worker, branch.run_id, branch.ended = self._worker, self.run_id, self.ended
        branch._cells, branch._run_cells = self._cells, self._run_cells
        branch._answer = branch._listen(local)
        timer = asyncio.get_running_loop().call_later(START_SECONDS, branch.hang_up)
        with theirs:
            self._send(wire.OP_FORK, number, [theirs.fileno()])
        try:
            branch.pid = (await branch._answer).pid
        finally:
            timer.cancel()
            branch._drop_folder()

    async def run(self, fds: Sequence[int], *, counted: bool, interactive: bool, wall_seconds: float) -> Done:
        """Run a cell until it ends, or is undone after `wall_seconds`.

        `fds` are the descriptors of its job. For `counted` and `interactive` see `Session.run`. Raises
        InterpreterExitedError if the interpreter exited; call `reap` then.
        """
        self._cells += 1
        self._run_cells += counted
        self.limit_hit = wire.NO_LIMIT
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        self._timers.append(loop.call_later(wall_seconds, self.cancel, wire.WALL))
        try:
            self._send(wire.OP_CELL, self._cells, fds, self._run_cells if counted else 0, interactive)
            done = await asyncio.shield(self._answer)
            self.pid = done.pid
            return done
        except asyncio.CancelledError:
            self.cancel(wire.CANCELLED)
            await asyncio.wait({self._answer}, timeout=_CANCEL_SECONDS + ANSWER_SECONDS)
            raise
        finally:
            self._stop_timers()

    def cancel(self, reason: int) -> None:
        """Undo the running cell. `reason` is the number of a limit in `wire`, of which the first is recorded."""
        if self.limit_hit != wire.NO_LIMIT:
            return
        self.limit_hit = reason
        self._send(wire.OP_CANCEL, self._cells, ())
        self._timers.append(asyncio.get_running_loop().call_later(_CANCEL_SECONDS, self.kill))

    def kill(self) -> None:
        """Let the forkserver end it with all its processes. A forkserver that does not answer is ended too."""
        assert self._worker is not None
        self._worker.kill(self.run_id)
        if self.ended is not None and not self.ended.done():
            self._timers.append(asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._worker.abandon))

    async def end(self) -> None:
        """Kill it, and wait at most `ANSWER_SECONDS` until all its processes have exited."""
        if self.ended is not None:
            self.kill()
            await asyncio.wait({self.ended}, timeout=ANSWER_SECONDS)
            self._stop_timers()

    async def reap(self) -> None:
        """Clean up after an interpreter that exited or cannot be reached. Raises WorkerExitedError."""
        self.hang_up()
        assert self.ended is not None
        self.kill()
        try:
            await asyncio.shield(self.ended)
        finally:
            self._stop_timers()
        self.forget()

    def forget(self) -> None:
        """Reset the handle after the interpreter has ended, so that another one can be started."""
        self.ended, self.died_idle = None, False

    def hang_up(self) -> None:
        """Close the channel. Raises InterpreterExitedError in a call that waits for an answer."""
        channel, self._channel = self._channel, None
        if channel is not None:
            asyncio.get_running_loop().remove_reader(channel.fileno())
            channel.close()
        self._drop_folder()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(InterpreterExitedError())

    def _listen(self, channel: socket.socket) -> asyncio.Future[Done]:
        channel.setblocking(False)
        self._channel = channel
        loop = asyncio.get_running_loop()
        loop.add_reader(channel.fileno(), self._receive)
        return loop.create_future()

    def _receive(self) -> None:
        assert self._channel is not None
        fds: list[int] = []
        try:
            message, fds, _, _ = socket.recv_fds(self._channel, 256, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if len(message) != wire.DONE.size:
            self.died_idle = self._answer is None or self._answer.done()
            self.hang_up()
        else:
            self._answered(Done(*wire.DONE.unpack(message)), fds)
        for fd in fds:
            os.close(fd)

    def _answered(self, done: Done, fds: list[int]) -> None:
        if self._answer is None or self._answer.done() or done.number not in (0, self._cells):
            self.died_idle = True
            self.hang_up()  # only an interpreter that user code has tampered with sends this
            return
        if done.outcome == wire.READY and fds:
            self._drop_folder()
            self._folder = fds.pop()
        self._answer.set_result(done)

    def _send(self, op: int, number: int, fds: Sequence[int], shown: int = 0, interactive: bool = False) -> None:
        spared = b"".join(wire.PID.pack(other.pid) for other in self._others() if other.run_id == self.run_id)
        message = wire.CELL.pack(op, number, shown, interactive, self._limits.output_bytes) + spared
        try:
            assert self._channel is not None
            socket.send_fds(self._channel, [message], fds)
        except OSError:
            self.hang_up()

    def _drop_folder(self) -> None:
        folder, self._folder = self._folder, -1
        if folder >= 0:
            os.close(folder)

    def _stop_timers(self) -> None:
        while self._timers:
            self._timers.pop().cancel()


def ignore(future: asyncio.Future[RunStatus]) -> None:
    """Mark the exception of a future as retrieved, so that asyncio does not log it."""
    with contextlib.suppress(asyncio.CancelledError):
        future.exception()
