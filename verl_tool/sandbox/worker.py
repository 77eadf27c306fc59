"""The pool's side of one forkserver."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_tool.errors import IsolationError, SandboxError
from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.isolation import bubblewrap
from verl_tool.sandbox.isolation.cgroup import ControlGroup, RunGroup
from verl_tool.sandbox.isolation.interpreter import Interpreter
from verl_tool.sandbox.isolation.levels import Isolation, Level
from verl_tool.sandbox.job import JobFiles
from verl_tool.sandbox.limits import Limits
from verl_tool.sandbox.policy import Policy

START_SECONDS = 60.0
"""Time for a forkserver to start and to import the warm modules."""
_END_SECONDS = 5.0
_CHANNEL_BYTES = 1 << 20
_UID_BASE = 1 << 28
_UIDS_PER_WORKER = 1 << 9
"""Each run has a uid of its own, because the kernel counts processes by uid. The uids are far above those of a host's
users. They are derived from the worker's pid, so that pools on one machine do not share them."""
MAX_SLOTS = _UIDS_PER_WORKER
_SESSION_UID_BASE, _SESSION_UIDS, _SESSION_WORKERS = 1 << 30, 1 << 12, 1 << 17
"""The same for the workers of sessions, which have more slots."""
MAX_SESSION_SLOTS = _SESSION_UIDS


@dataclass(frozen=True)
class WorkerSetup:
    """Settings of a worker."""

    interpreter: Interpreter
    isolation: Isolation
    policy: Policy
    modules: tuple[str, ...]
    slots: int
    """Maximum number of concurrent runs in one worker."""
    group: ControlGroup | None
    """Control group of all workers of the pool, None if the host does not allow any."""
    sessions: bool = False
    """Whether the worker runs sessions."""


@dataclass(frozen=True)
class RunStatus:
    """How a run ended."""

    reached: bool
    """Whether the user's code was reached."""
    gone: bool
    """Whether all processes of the run have exited. If not, its control group must not be used again."""
    limit_hit: str | None
    status: int
    """Exit status as in `os.waitpid`."""
    wall_seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    folder_fd: int
    """Descriptor of the run's folder, which the receiver closes; -1 if it was not requested or does not exist."""


class WorkerExitedError(SandboxError):
    """The forkserver exited during the run, or before it accepted the run."""


class Worker:
    """A forkserver and its runs. Call `start` once. When the forkserver dies, `on_death` is called once."""

    def __init__(self, setup: WorkerSetup, on_death: Callable[[Worker], None]) -> None:
        self.setup = setup
        self._on_death = on_death
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[RunStatus]] = {}
        self._scratch: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self.alive = False
        self.loaded: list[str] = []
        self.missing: dict[str, str] = {}
        """Warm modules that could not be imported, and the reasons."""
        self.modules: frozenset[str] = frozenset()
        """Top-level names of all imported modules."""
        self.resident_bytes = 0
        """Memory of the warm interpreter, with which each run starts and which it may copy."""

    @property
    def live(self) -> int:
        """Number of runs in progress."""
        return len(self._waiting)

    @property
    def pid(self) -> int | None:
        """Process id of the outermost process."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the forkserver and wait until it is warm.

        Raises IsolationError if it cannot work on this machine, and SandboxError if it is not ready in time.
        """
        local, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = local
        local.setblocking(False)
        local.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHANNEL_BYTES)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHANNEL_BYTES)
        with theirs:
            self._process = self._spawn(theirs.fileno())
        try:
            answer = await asyncio.wait_for(self._introduce(), START_SECONDS)
        except (asyncio.TimeoutError, OSError) as error:
            await self.close()
            raise SandboxError(f"a forkserver did not get ready within {START_SECONDS:g} s: {error!r}") from error
        if "error" in answer:
            await self.close()
            raise IsolationError(f"a forkserver could not start: {answer['error']}")
        self.loaded, self.missing, self.modules = answer["loaded"], answer["missing"], frozenset(answer["imported"])
        self.resident_bytes = answer["resident"]
        self.alive = True
        asyncio.get_running_loop().add_reader(local.fileno(), self._receive)

    def _spawn(self, channel_fd: int) -> subprocess.Popen[bytes]:
        setup = self.setup
        if setup.isolation.level is Level.none:
            self._scratch = tempfile.mkdtemp(prefix="verl-tool-")
            command = bubblewrap.forkserver_command(setup.interpreter.executable, bubblewrap.INSIDE, channel_fd)
        else:
            command = bubblewrap.isolated_command(
                setup.isolation.bwrap, setup.interpreter, channel_fd, setup.isolation.as_root
            )
        if setup.group is not None:
            command = setup.group.joining(command)
        return subprocess.Popen(
            command,
            pass_fds=(channel_fd,),
            env=_environment(setup),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,
        )

    async def _introduce(self) -> dict:
        """Send the forkserver its settings and return its answer."""
        assert self._process is not None
        setup, policy = self.setup, self.setup.policy
        config = {
            "isolated": setup.isolation.level is not Level.none,
            "as_root": setup.isolation.as_root,
            "server_filter": setup.isolation.server_filter.hex(),
            "run_filter": setup.isolation.run_filter.hex(),
            "uid_base": _uid_base(setup, self._process.pid),
            "sessions": setup.sessions,
            "slots": setup.slots,
            "scratch": self._scratch or "",
            "modules": list(setup.modules),
            "policy": {
                "allowed_modules": None if policy.allowed_modules is None else list(policy.allowed_modules),
                "restricted_functions": list(policy.restricted_functions),
                "pre_import": list(policy.pre_import),
            },
        }
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._channel, wire.first_message(config))
        answer = await loop.sock_recv(self._channel, _CHANNEL_BYTES)
        return wire.read_first_message(answer) if answer else {"error": self._read_stderr()}

    def _read_stderr(self) -> str:
        """Return the end of what the forkserver wrote to stderr."""
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace").strip()
        return text[-2000:] or "it exited without a message"

    def begin(
        self,
        job: JobFiles,
        limits: Limits,
        fetch: bool,
        group: RunGroup | None,
        kind: int = wire.PROGRAM,
        box: int = 0,
        streams: Sequence[int] = (),
    ) -> tuple[int, asyncio.Future[RunStatus]]:
        """Send a run to the forkserver. Return its id and a future of its `RunStatus`.

        `fetch` requests the run's folder. `group` is its control group. For `kind` and `box` see `wire.RUN`. `streams`
        (stdout, stderr and stdin) replace those of the job.

        Raises WorkerExitedError if the forkserver has exited; the run has not started then. If it exits later, the
        future raises this error.
        """
        run_id = next(self._ids)
        procs_files = group.procs_files() if group is not None else []
        message = wire.RUN.pack(
            wire.OP_RUN,
            run_id,
            limits.wall_seconds,
            limits.cpu_seconds or 0.0,
            limits.memory_bytes,
            limits.processes,
            limits.open_files,
            limits.output_bytes,
            limits.disk_bytes,
            limits.disk_files,
            fetch,
            len(procs_files),
            kind,
            box,
        )
        try:
            fds = [job.fds[0], *streams] if streams else job.fds
            socket.send_fds(self._channel, [message], [*fds, *procs_files])
        except OSError as error:
            raise WorkerExitedError(f"a forkserver accepts no more runs: {error}", retryable=True) from error
        future: asyncio.Future[RunStatus] = asyncio.get_running_loop().create_future()
        self._waiting[run_id] = future
        return run_id, future

    def abandon(self) -> None:
        """Kill a forkserver that does not answer. Its death is then handled like any other."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self, run_id: int, reason: int = wire.CANCELLED) -> None:
        """End a run early. `reason` is the number of a limit in `wire`. Its future is set as usual."""
        with contextlib.suppress(OSError):  # the runs of a dead forkserver have ended already
            self._channel.send(wire.KILL.pack(wire.OP_KILL, run_id, reason))

    def drop(self, box: int) -> None:
        """Remove a box, whose runs have all ended."""
        with contextlib.suppress(OSError):
            self._channel.send(wire.KILL.pack(wire.OP_DROP, box, 0))

    def _receive(self) -> None:
        while self.alive:
            try:
                message, fds, _, _ = socket.recv_fds(self._channel, 256, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionError:
                message, fds = b"", []
            if not message:
                self._died()
                return
            run_id, reached, exited, limit, status, wall, cpu, peak = wire.REPLY.unpack(message)
            folder_fd = fds[0] if fds else -1
            future = self._waiting.pop(run_id, None)
            if future is None or future.done():
                if folder_fd >= 0:
                    os.close(folder_fd)
                continue
            limit_hit = wire.LIMIT_NAMES[limit]
            future.set_result(RunStatus(bool(reached), bool(exited), limit_hit, status, wall, cpu, peak, folder_fd))

    def _died(self) -> None:
        if not self.alive:
            return
        self._stop_reading()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(WorkerExitedError("a forkserver died during the run", retryable=False))
        self._on_death(self)

    def _stop_reading(self) -> None:
        if self.alive:
            self.alive = False
            asyncio.get_running_loop().remove_reader(self._channel.fileno())

    async def close(self) -> None:
        """End the forkserver and all its runs."""
        self._stop_reading()
        self._channel.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerExitedError("the pool was closed", retryable=True))
        self._waiting = {}
        if self._process is not None:
            await asyncio.to_thread(self._reap, self._process)
        if self._scratch is not None:
            await asyncio.to_thread(shutil.rmtree, self._scratch, True)
        self._stderr.close()

    @staticmethod
    def _reap(process: subprocess.Popen[bytes]) -> None:
        # There is no need to wait for a busy forkserver: the kernel ends its runs with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)


def _uid_base(setup: WorkerSetup, pid: int) -> int:
    """Return the uid of a worker's first slot."""
    if setup.sessions:
        return _SESSION_UID_BASE + pid % _SESSION_WORKERS * _SESSION_UIDS
    return _UID_BASE + pid * _UIDS_PER_WORKER


def _environment(setup: WorkerSetup) -> dict[str, str]:
    """Return the environment of runs, and LD_BIND_NOW, which only the forkserver sees."""
    folder = os.path.dirname(setup.interpreter.executable)
    if setup.isolation.level is not Level.none:
        folder = bubblewrap.place(folder)
    one_thread = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        "PATH": f"{folder}:/usr/bin:/bin" if folder not in ("/usr/bin", "/bin") else "/usr/bin:/bin",
        "HOME": wire.WORK_DIRECTORY,
        "LANG": "C.UTF-8",
        "MPLBACKEND": "Agg",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_BIND_NOW": "1",
        **dict.fromkeys(one_thread, "1"),
    }
