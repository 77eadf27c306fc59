"""A session: Python state, files and programs of one trajectory, isolated and limited like a run.

    async with pool.session(files={"data.csv": b"a,b"}) as session:
        await session.run("rows = open('data.csv').read()")
        result = await session.run("rows.split(',')", interactive=True)      # result.stdout == "['a', 'b']\\n"
        listing = await session.exec("ls -l")

The Python state is a process that forks before each cell (`inside.interpreter_process`). If a cell does not end, it is
undone: the state is that before the cell. This does not undo changes to files in the session's folder, positions in
files that were open before, and what was written to shared maps, pipes and sockets. Threads and other processes cannot
be forked. They are ended with their cell and reported in its result. Each cell has a process id of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import marshal
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from verl_tool.errors import ConfigError, LateError, SandboxError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.sandbox import oom_kills
from verl_tool.sandbox.backends import transfer
from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.job import JobFiles, check_names, encode
from verl_tool.sandbox.result import CellResult, RunResult
from verl_tool.sandbox.session.command_relay import SessionRequestFolder
from verl_tool.sandbox.session.files import FOLDERS, SessionFiles
from verl_tool.sandbox.session.interpreter_handle import (
    ANSWER_SECONDS,
    Done,
    InterpreterExitedError,
    InterpreterHandle,
    ignore,
)
from verl_tool.sandbox.worker import RunStatus, Worker, WorkerExitedError
from verl_tool.util.slots import hold_slot

if TYPE_CHECKING:
    from verl_tool.sandbox.isolation.cgroup import RunGroup
    from verl_tool.sandbox.limits import SessionLimits
    from verl_tool.sandbox.session.pool import SessionPool

T = TypeVar("T")

_NOTHING: Mapping[str, str] = MappingProxyType({})
_NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_PACK = (
    r"find work tmp \( -type d ! -perm -500 -exec chmod u+rx {} \; \) , \( -type f ! -perm -400 -exec chmod u+r {} + \)"
    " >&2; exec tar -cSf - work tmp"
)
_UNPACK = "exec tar -xpSf - --no-same-owner --delay-directory-restore"


class SessionProcess:
    """A program that runs independently of the session's calls. See `Session.spawn`."""

    def __init__(self, worker: Worker, run_id: int, ended: asyncio.Future[RunStatus]) -> None:
        self._worker, self._run_id, self._ended = worker, run_id, ended

    @property
    def running(self) -> bool:
        """Whether it, or a process that it started, is running."""
        return not self._ended.done()

    def kill(self, reason: int = wire.CANCELLED) -> None:
        """End it with all processes that it started. `reason` is the number of a limit in `wire`. Does not wait."""
        self._worker.kill(self._run_id, reason)

    async def wait(self) -> RunStatus:
        """Wait until it and all processes that it started have ended. Raises SandboxError if its forkserver died."""
        return await asyncio.shield(self._ended)


class Session:
    """One session. Call `start` and `close`, or use it as a context manager. Its calls run one after the other.

    Calls raise `ToolFault` with the kind ``state_lost`` if the session was evicted or its forkserver died, which is not
    the program's fault. Failures of the program are reported in its result.
    """

    work_directory = wire.WORK_DIRECTORY
    pristine = True

    def __init__(self, pool: SessionPool, limits: SessionLimits, files: Mapping[str, bytes]) -> None:
        """Store the settings. Raises ConfigError if a file name is invalid, or the files exceed the disk limit."""
        check_names(files, ())
        size = sum(map(len, files.values()))
        if size > limits.disk_bytes:
            raise ConfigError(f"files are {size} bytes, the limit disk_bytes is {limits.disk_bytes}; raise it")
        self._pool, self.limits, self._input_files = pool, limits, files
        self._lock = asyncio.Lock()
        self._worker: Worker | None = None
        self._group: RunGroup | None = None
        self._box = 0
        self._files: SessionFiles | None = None
        self._keeper = InterpreterHandle(limits, self._other_interpreters)
        self._processes: dict[int, SessionProcess] = {}
        self._branches: list[Session] = [self]
        """All sessions that share its folders, limits and lock: itself and all forks of the same original."""
        self._number = 0
        self._numbers = itertools.count(1)
        self._wall = 0.0
        self._lost = "the session has not been started"
        self._lost_kind = FaultKind.STATE_LOST
        self._closing: asyncio.Task[None] | None = None
        self._num_waits = 0
        """How many of its verifications wait in a queue."""
        self._has_companion = False
        """Whether it has a companion, whose slot its own calls use."""
        self.last_used = time.monotonic()
        """Time of the last use, by `time.monotonic`."""
        self.memory_bytes = 0
        """Memory after its last call, as counted by its control group. 0 without one."""

    @property
    def lost(self) -> bool:
        """Whether it rejects calls, because it is ending or has not been started."""
        return bool(self._lost)

    @property
    def busy(self) -> bool:
        """Whether a call is in progress, or it has a companion, or waits for one."""
        return self._lock.locked() or self._has_companion or self._num_waits > 0

    def pause(self) -> None:
        """Count as busy until `resume`."""
        self._num_waits += 1

    def resume(self) -> None:
        """End a `pause`."""
        self._num_waits -= 1
        self.touch()

    @property
    def shared(self) -> bool:
        """Whether it shares its folders with a branch."""
        return len(self._branches) > 1

    async def __aenter__(self) -> Session:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Make its folders and start its interpreter.

        Raises ToolFault ``overloaded`` if there are too many sessions, ConfigError if its files cannot be written under
        their names, and SandboxError if the sandbox failed.
        """
        self._pool.admit(self)
        try:
            self._worker = await self._pool.worker()
            self._group = self._pool.take_group(self._worker, self.limits)
            await self._start_interpreter(self._input_files)
            self._input_files, self._lost = _NO_FILES, ""
        except BaseException:
            await self.close()
            raise
        self.touch()

    def touch(self) -> None:
        """Record that it is used now. A session that is idle for too long is evicted."""
        self.last_used = time.monotonic()

    async def run(
        self,
        code: str,
        *,
        stdin: str | bytes = "",
        interactive: bool = False,
        wall_seconds: float | None = None,
        counted: bool = True,
    ) -> CellResult:
        """Run a cell of Python in the session's state.

        With `interactive`, ``await`` is allowed at the top level, and the value of a last expression is passed to
        `sys.displayhook`, which prints it unless it is None. `wall_seconds` overrides the limit of one call.
        Tracebacks call the cell ``<cell N>`` if it is `counted`, and ``<cell>`` otherwise.

        Raises ToolFault ``state_lost`` (see the class), and SandboxError if the sandbox failed; the state is that
        before the cell then.
        """
        with contextlib.closing(JobFiles(encode(code), encode(stdin), {})) as job:
            async with self._turn():
                exhausted = self._exhausted()
                if exhausted:
                    return self._cell_result(job, None, 0.0, 0.0, exhausted)
                if self._keeper.died_idle:
                    return await self._dead_interpreter_result(job)
                if not self._keeper.alive:
                    await self._start_interpreter(_NO_FILES)
                return await self._run_cell(job, counted, interactive, self._wall_left(wall_seconds))

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: str | bytes = "",
        wall_seconds: float | None = None,
        env: Mapping[str, str] = _NOTHING,
        cwd: str = wire.WORK_DIRECTORY,
    ) -> RunResult:
        """Run a program in the session's folders. Processes that it leaves running are ended.

        `command` is a list of arguments, or a command line for ``bash -c``. `wall_seconds` overrides the limit of one
        call. `env` are variables in addition to those of every program in the sandbox. A relative `cwd` is relative to
        the session's folder.

        Raises ToolFault ``state_lost`` (see the class), and SandboxError if the sandbox failed.
        """
        with contextlib.closing(JobFiles(_packed(command, env, cwd), encode(stdin), {})) as job:
            async with self._turn():
                exhausted = self._exhausted()
                if exhausted:
                    return job.result(self.limits, exit_code=None, killed_by=None, limit_hit=exhausted)
                limits = replace(self.limits, wall_seconds=self._wall_left(wall_seconds))
                cpu = self._cpu()
                process = self._begin(job, limits, ())
                finished = await self._ended(process, limits.wall_seconds + ANSWER_SECONDS)
                self._require_result()
                return self._exec_result(job, finished, self._cpu() - cpu)

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        streams: tuple[int, int, int],
        env: Mapping[str, str] = _NOTHING,
        cwd: str = wire.WORK_DIRECTORY,
        terminal: bool = False,
    ) -> SessionProcess:
        """Start a program that runs independently of the session's calls, at most until the session ends.

        `streams` are descriptors of stdin, stdout and stderr, which the caller closes. With `terminal`, stdin is a
        terminal (pty(7)) that controls the program. The other arguments are those of `exec`.

        Raises ToolFault ``state_lost`` (see the class), and SandboxError if the sandbox failed.
        """
        with contextlib.closing(JobFiles(_packed(command, env, cwd, terminal), b"", {})) as job:
            async with self._lock:
                self._require()
                if self.shared:
                    raise SandboxError(
                        "a session that shares its folders with a branch cannot start a program that goes on running",
                        retryable=False,
                    )
                process = self._begin(job, replace(self.limits, wall_seconds=float("inf")), streams)
        asyncio.get_running_loop().create_task(self._enforce_limits(process))
        self.touch()
        return process

    async def fork(self) -> Session:
        """Make a second session with the same Python state and files.

        The two sessions share the user and the limits (of disk, memory, processes and CPU time), and their calls run
        one after the other. Each finds its own files at the usual paths. The sessions are not isolated from each other:
        a program of one can, for example, kill processes of the other. Open files and their positions are shared.
        Random generators continue with the same numbers in both.

        Raises ToolFault ``overloaded`` if there are too many sessions and ``state_lost`` (see the class), and
        SandboxError if a program of `spawn` is running, which cannot be copied, the files do not fit on the disk, or
        the Python state was lost and no cell has reported it yet.
        """
        branch = Session(self._pool, self.limits, {})
        self._pool.admit(branch)
        try:
            async with self._turn():
                if self._processes:
                    raise SandboxError("a program that is running cannot be copied; end it first", retryable=False)
                if not self._keeper.alive:
                    raise SandboxError("the session has no Python state; run a cell first", retryable=False)
                branch._join(self)
                await self._copy_files(branch._number)
                await self._fork_interpreter(branch)
        except BaseException:
            await branch.close()
            raise
        return branch

    def _join(self, other: Session) -> None:
        self._lock, self._worker, self._group = other._lock, other._worker, other._group
        self._box, self._files, self._processes = other._box, other._files, other._processes
        self._branches, self._numbers, self._number = other._branches, other._numbers, next(other._numbers)
        self._wall = other._wall
        self._branches.append(self)

    async def _copy_files(self, number: int) -> None:
        target = wire.BRANCH_FOLDER.format(number=number, name="$f")
        copy = f"cd {wire.BOX} && for f in {' '.join(FOLDERS)}; do cp -aT $f {target} || exit; done"
        finished, complaint = await self._command(copy)
        if finished.status != 0:
            raise SandboxError(f"the session's files cannot be copied: {complaint}", retryable=False)

    async def _command(self, line: str) -> tuple[RunStatus, str]:
        """Run a shell command of the pool in the session. Return its status and the text on stderr."""
        with contextlib.closing(JobFiles(_packed(line, _NOTHING, wire.BOX), b"", {})) as job:
            finished = await self._ended(self._begin(job, self.limits, ()), self.limits.wall_seconds + ANSWER_SECONDS)
            return finished, job.output(1000).stderr.decode(errors="replace").strip()

    async def _fork_interpreter(self, branch: Session) -> None:
        try:
            await self._keeper.fork(branch._keeper, branch._number)
        except InterpreterExitedError:
            raise SandboxError("the session's interpreter could not be forked", retryable=False) from None
        branch._lost = ""
        branch.touch()

    def _other_interpreters(self) -> list[InterpreterHandle]:
        return [branch._keeper for branch in self._branches if branch is not self]

    async def end_programs(self) -> None:
        """End its Python state and the programs of `spawn`, and reset the wall time of its calls. Its files remain.

        This prepares the session for another user, such as a verifier. Raises ToolFault ``state_lost`` (see the class),
        and SandboxError if a process does not end, or the session shares its folders with a branch.
        """
        async with self._lock:
            self._require()
            if self.shared:
                raise SandboxError(
                    "a session that shares its folders with a branch cannot be had alone; close the branch first",
                    retryable=False,
                )
            self._keeper.hang_up()
            if not await self._end_all():
                raise SandboxError("a program of the session could not be ended", retryable=False)
            self._keeper.forget()
            self._wall = 0.0
            self.touch()

    @contextlib.asynccontextmanager
    async def companion(self, limits: SessionLimits, folders: Sequence[str] = ()) -> AsyncIterator[Session]:
        """Start a second session, for programs that judge the results of this one. folders: it makes its own.

        The sessions are isolated from each other: they have different users, processes, folders and limits, and
        different user namespaces where users are not available. `copy_files` copies what the companion may see. While
        it exists, this session is not idle. Its calls need no slots of their own, since they are part of a call of the
        companion.

        Raises the errors of `start`, except that for too many sessions: further companions wait.
        """
        async with hold_slot(self._pool.companions), self._pool.uncounted(limits) as companion:
            self._has_companion = True
            try:
                yield companion
            finally:
                self._has_companion = False
                self.touch()

    async def copy_files(self, target: Session, wall_seconds: float) -> str:
        """Copy the work folder and /tmp to those of another session, including modes, times and links.

        Files that are unreadable for this session's user are made readable first. Returns the reason if not everything
        was copied, and otherwise an empty text. Raises ToolFault ``state_lost`` (see the class), and SandboxError if
        the sandbox failed, takes longer than `wall_seconds`, or does not contain ``find`` and ``tar``.
        """
        async with self._turn(), target._lock:
            target._require()
            with (
                contextlib.closing(JobFiles(_packed(_PACK, _NOTHING, wire.BOX), b"", {})) as packing,
                contextlib.closing(JobFiles(_packed(_UNPACK, _NOTHING, wire.BOX), b"", {})) as unpacking,
            ):
                processes = self._begin_copy(target, packing, unpacking, wall_seconds)
                seconds = wall_seconds + ANSWER_SECONDS
                ends = await asyncio.gather(self._ended(processes[0], seconds), target._ended(processes[1], seconds))
                results = (self._exec_result(packing, ends[0], 0.0), target._exec_result(unpacking, ends[1], 0.0))
        if any(result.exit_code in (126, 127) for result in results):
            raise SandboxError(f"files cannot be copied: {results[0].stderr} {results[1].stderr}", retryable=False)
        if any(result.limit_hit == "wall_seconds" for result in results):
            raise LateError(f"files were not copied within {wall_seconds:g} s", retryable=False)
        failed = [result for result in results if not result.ok]
        return "; ".join(result.stderr.strip() or f"it was ended by {result.limit_hit}" for result in failed)

    def _begin_copy(
        self, target: Session, packing: JobFiles, unpacking: JobFiles, wall_seconds: float
    ) -> tuple[SessionProcess, SessionProcess]:
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        reading, writing = os.pipe()
        try:
            limits = [replace(session.limits, wall_seconds=wall_seconds) for session in (self, target)]
            sending = self._begin(packing, limits[0], (null, writing, packing.fds[2]))
            return sending, target._begin(unpacking, limits[1], (reading, unpacking.fds[1], unpacking.fds[2]))
        finally:
            for fd in (null, reading, writing):
                os.close(fd)

    def request_folder(self, folder: str) -> SessionRequestFolder:
        """The requests that its programs write to a folder, for `CommandRelay`."""
        return SessionRequestFolder(self, folder)

    def whole(self) -> bool:
        """Return whether its folders are unchanged. Its programs can move them, and replace them by links."""
        return self._files is not None and self._files.whole()

    async def read_file(self, path: str) -> bytes:
        """Read a file in the session's folder or in its /tmp, without following links. Raises OSError like `open`."""
        async with self._lock:
            self._require()
            self.touch()
            return await _in_thread(partial(self.own_files().read, path))

    async def write_file(self, path: str, content: bytes) -> None:
        """Write such a file, and make the folders above it. Raises OSError like `open`."""
        async with self._lock:
            self._require()
            self.touch()
            await _in_thread(partial(self.own_files().write, path, content))

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file, or the content of a folder, from this machine to `target`. Raises OSError."""
        await transfer.upload(self, source, target, self.limits.disk_bytes)

    async def download(self, source: str, target: Path) -> None:
        """Copy a file, or the content of a folder, to `target` on this machine. See `Sandbox.download`."""
        await transfer.download(self, source, target)

    async def close(self) -> None:
        """End all its processes and remove its files."""
        self._lost = self._lost or "the session was closed"
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    stop = close

    def worker_died(self, worker: Worker) -> None:
        """Handle the death of a forkserver, which ends the session if it is its own."""
        if worker is self._worker:
            self.evict("the forkserver of the session died")

    def evict(self, reason: str, kind: FaultKind = FaultKind.STATE_LOST, *, after_call: bool = False) -> None:
        """Close it in a task. Later calls raise a fault of this kind with the reason.

        With `after_call`, it is closed after the call in progress, which keeps its result. Programs of `spawn` are not
        waited for.
        """
        if not self._lost:
            self._lost, self._lost_kind = reason, kind
            self._pool.close_soon(self._close_after_call() if after_call else self.close())

    def own_files(self) -> SessionFiles:
        """Move its files to their paths and return them, even during a call. Raises ToolFault ``state_lost``."""
        self._require()
        assert self._files is not None
        try:
            self._files.show(self._number)
        except OSError as error:
            for branch in self._branches:
                branch.evict(f"a program of the session has moved its folders ({error})")
            self._require()
        return self._files

    async def _leave(self, other: Session) -> None:
        """Remove its own files only, since other branches exist. Its interpreter exits when its channel is closed."""
        if all(branch._keeper.run_id != self._keeper.run_id for branch in self._branches):
            await self._keeper.end()
        with contextlib.suppress(ToolFault, SandboxError):  # in which case all branches end
            other.own_files()
            names = [wire.BRANCH_FOLDER.format(number=self._number, name=name) for name in FOLDERS]
            await other._command(f"cd {wire.BOX} && rm -rf {' '.join(names)}")

    async def _close_after_call(self) -> None:
        async with self._lock:
            pass
        await self.close()

    async def _close(self) -> None:
        self._keeper.hang_up()
        if len(self._branches) == 1:
            for process in self._processes.values():
                process.kill()
        async with self._lock:
            self._branches.remove(self)
            if self._branches:
                await self._leave(self._branches[0])
        if not self._branches:
            await self._close_all()
        self._pool.forget(self)

    async def _close_all(self) -> None:
        exited = await self._end_all()
        if self._files is not None:
            self._files.close()
            self._files = None
        if self._worker is not None and self._box and exited:
            self._worker.drop(self._box)
        if self._group is not None:
            self._pool.give_group(self._group, gone=exited)

    async def _end_all(self) -> bool:
        """End all its processes. Return whether all of them have exited."""
        for process in self._processes.values():
            process.kill()
        futures = {process._ended for process in self._processes.values()}
        if self._keeper.ended is not None:
            futures.add(self._keeper.ended)
            await self._keeper.end()
        if futures:
            _, pending = await asyncio.wait(futures, timeout=ANSWER_SECONDS)
            for future in pending:
                future.add_done_callback(ignore)
        return all(f.done() and not f.cancelled() and f.exception() is None and f.result().gone for f in futures)

    # Order of calls:

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Make one call at a time, each in a slot of the pool. Raises ToolFault if the session has lost its state."""
        async with self._lock:
            self._require()
            slot = None if self._has_companion else await self._pool.run_slots.enter()
            started = time.monotonic()
            try:
                self._require()
                self.own_files()
                if self._group is not None:
                    self._group.forgive()
                yield
            finally:
                if slot is not None:
                    self._pool.run_slots.leave(slot)
                self._wall += time.monotonic() - started
                self.touch()
                self.measure()
                self._pool.enforce_memory()

    def _require(self) -> None:
        if self._lost:
            raise ToolFault(self._lost_kind, self._lost, retryable=False)

    def _require_result(self) -> None:
        """Check the session after a call. The result is valid if an eviction waits for the call."""
        if self._closing is not None:
            self._require()

    def measure(self) -> None:
        """Measure its memory."""
        if self._group is not None and not self._lost:
            for branch in self._branches:
                branch.memory_bytes = self._group.memory_now() // len(self._branches)
            self._pool.measured(self._group)

    def _cpu(self) -> float:
        return self._group.cpu_seconds() if self._group is not None else 0.0

    def _wall_left(self, requested: float | None) -> float:
        left = self.limits.total_wall_seconds - self._wall
        return max(0.01, min(self.limits.wall_seconds if requested is None else requested, left))

    def _exhausted(self) -> str | None:
        """Return the limit of the whole session that is used up, None if there is none."""
        if self._wall >= self.limits.total_wall_seconds:
            return "total_wall_seconds"
        if self.limits.cpu_seconds is not None and self._cpu() >= self.limits.cpu_seconds:
            return "cpu_seconds"
        return None

    # Programs:

    def _begin(self, job: JobFiles, limits: SessionLimits, streams: Sequence[int]) -> SessionProcess:
        """Start a command. `streams` are its stdin, stdout and stderr. If empty, those of the job are used."""
        assert self._worker is not None
        order = (streams[1], streams[2], streams[0]) if streams else ()
        try:
            run_id, finished = self._worker.begin(job, limits, False, self._group, wire.COMMAND, self._box, order)
        except WorkerExitedError as error:
            raise self._state_lost(error) from error
        self._processes[run_id] = process = SessionProcess(self._worker, run_id, finished)
        finished.add_done_callback(ignore)
        finished.add_done_callback(lambda _: self._processes.pop(run_id, None))
        return process

    async def _enforce_limits(self, process: SessionProcess) -> None:
        """Enforce the session's limits on a process of `spawn` until it ends."""
        with (
            contextlib.suppress(SandboxError),
            self._pool.enforced(self._group, self.limits, process.kill),
        ):
            await process.wait()

    async def _ended(self, process: SessionProcess, seconds: float) -> RunStatus:
        """Wait for the end of a command, by itself or by a limit."""
        assert self._worker is not None
        timer = asyncio.get_running_loop().call_later(seconds, self._worker.abandon)
        try:
            with self._pool.enforced(self._group, self.limits, process.kill):
                return await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await asyncio.wait({process._ended}, timeout=ANSWER_SECONDS)
            raise
        except WorkerExitedError as error:
            raise self._state_lost(error) from error
        finally:
            timer.cancel()

    def _exec_result(self, job: JobFiles, ended: RunStatus, cpu_seconds: float) -> RunResult:
        if not ended.reached and ended.limit_hit is None:
            raise SandboxError(f"a command could not be set up: {job.failure()}", retryable=True)
        if self._group is not None:
            ended = oom_kills.judge_by_group(ended, self._group, self._pool.fair_share)
        exit_code, killed_by = _parse_status(ended.status)
        return job.result(
            self.limits,
            exit_code=exit_code,
            killed_by=killed_by,
            limit_hit=ended.limit_hit or ("cpu_seconds" if killed_by == signal.SIGXCPU else None),
            wall_seconds=ended.wall_seconds,
            cpu_seconds=cpu_seconds if self._group is not None else ended.cpu_seconds,
            peak_memory_bytes=ended.peak_memory_bytes,
        )

    # Python state:

    async def _start_interpreter(self, files: Mapping[str, bytes]) -> None:
        """Start a fresh interpreter in the session's folders. The first call makes them and writes `files`."""
        assert self._worker is not None
        with contextlib.closing(JobFiles(b"", b"", files)) as job:
            try:
                folder = await self._keeper.start(self._worker, job, self._group, self._box)
            except WorkerExitedError as error:
                raise self._state_lost(error) if self._box else error from None
            except InterpreterExitedError:
                await self._reap_interpreter()
                if job.state() == wire.FILES_REJECTED:
                    raise ConfigError(f"the files of a session cannot be laid out: {job.failure()}") from None
                raise SandboxError(f"a session could not be set up: {job.failure()}", retryable=True) from None
            finally:
                self._box = self._box or self._keeper.run_id
        if self._files is None:
            self._files = SessionFiles(folder, self.limits.disk_bytes)
        else:
            os.close(folder)

    async def _run_cell(self, job: JobFiles, counted: bool, interactive: bool, wall: float) -> CellResult:
        started, cpu = time.monotonic(), self._cpu()
        done: Done | None = None
        try:
            with self._pool.enforced(self._group, self.limits, self._keeper.cancel):
                done = await self._keeper.run(job.fds, counted=counted, interactive=interactive, wall_seconds=wall)
        except asyncio.CancelledError:
            if self._keeper.lost_a_cell:
                await self._reap_interpreter()
            raise
        except InterpreterExitedError:
            await self._reap_interpreter()
        return self._cell_result(job, done, time.monotonic() - started, self._cpu() - cpu, None)

    async def _dead_interpreter_result(self, job: JobFiles) -> CellResult:
        """Return the result of a cell that is not run because its state was lost."""
        await self._reap_interpreter()
        self._keeper.limit_hit = wire.NO_LIMIT
        return self._cell_result(job, None, 0.0, 0.0, None)

    async def _reap_interpreter(self) -> None:
        """Reap the interpreter. Raises ToolFault if the forkserver has died, or the session was closed."""
        if self._files is not None:
            self._require_result()
        try:
            await self._keeper.reap()
        except WorkerExitedError as error:
            raise self._state_lost(error) from error

    def _state_lost(self, error: Exception) -> ToolFault:
        self.evict(f"the forkserver of the session died ({error})")
        return ToolFault(self._lost_kind, self._lost, retryable=False)

    def _cell_result(
        self, job: JobFiles, done: Done | None, wall: float, cpu: float, exhausted: str | None
    ) -> CellResult:
        """Make the result of a cell. `done` is None if the interpreter exited, or a limit is `exhausted`."""
        hit = exhausted or self._determine_limit(done)
        state = "kept" if exhausted else "lost"
        exit_code, killed_by = None, None if exhausted else int(signal.SIGKILL)
        if done is not None and done.outcome == wire.PRESERVED:
            state, exit_code, killed_by, hit = "kept", done.status, None, None
        elif done is not None:
            state = "rolled_back"
            exit_code, killed_by = _parse_status(done.status)
            hit = hit or ("cpu_seconds" if killed_by == signal.SIGXCPU else None)
        result = job.result(
            self.limits,
            exit_code=exit_code,
            killed_by=killed_by,
            limit_hit=hit,
            wall_seconds=wall,
            cpu_seconds=cpu,
            peak_memory_bytes=done.peak_bytes if done is not None else 0,
        )
        known = {field.name: getattr(result, field.name) for field in fields(RunResult)}
        threads, processes = (done.threads, done.processes) if done is not None else (0, 0)
        return CellResult(**known, state=state, ended_threads=threads, ended_processes=processes)

    def _determine_limit(self, done: Done | None) -> str | None:
        """Return the limit that ended the cell. Raises if the kernel killed it for the memory use of others."""
        hit = wire.LIMIT_NAMES[self._keeper.limit_hit]
        if self._group is None or not self._group.lost_process():
            return hit
        if self._group.exceeded_memory() or self._group.max_memory > self._pool.fair_share:
            return "memory_bytes"
        if done is None:
            raise self._state_lost(oom_kills.killed_for_others())
        raise oom_kills.killed_for_others()


async def _in_thread(work: Callable[[], T]) -> T:
    """Return ``work()``, computed in a thread, since a large file takes tens of milliseconds.

    A cancelled call waits for its end too, because it uses the session's folders.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _parse_status(status: int) -> tuple[int | None, int | None]:
    """Return the exit code and the signal of a wait status, of which one is None."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def _packed(command: str | Sequence[str], env: Mapping[str, str], cwd: str, terminal: bool = False) -> bytes:
    """Encode a command for `inside.command`."""
    arguments = ["bash", "-c", command] if isinstance(command, str) else list(command)
    if not arguments:
        raise ConfigError("a command has no words; give the program's name at least")
    folder = os.path.join(wire.WORK_DIRECTORY, cwd)
    return marshal.dumps((arguments, dict(env), folder, terminal), wire.MARSHAL_VERSION)
