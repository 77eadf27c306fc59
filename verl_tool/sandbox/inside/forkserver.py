"""The trusted process inside the isolation. It is warmed once and forks for every run, but never runs user code.

For each run it starts a *pid 1* (`linux.clone_idle`: a sleeping process with new pid and mount namespaces) and forks
itself into that pid namespace. The fork confines itself (`confine`) and runs the user's program (`program`). When the
program's first process exits or a limit is hit, the forkserver kills pid 1, and the kernel kills all processes in its
namespace. The reply is sent once pid 1 has exited, so no process of a run outlives its reply.
"""

from __future__ import annotations

import _signal
import _socket
import ctypes
import errno
import gc
import importlib
import math
import mmap
import os
import resource
import select
import sys
import time
import warnings

from . import confine, linux, policy_hooks, program, shell_command, streams, warmup, wire
from .resource_monitor import ResourceMonitor, Use

TYPE_CHECKING = False  # importing `typing`, `contextlib`, `threading` or `signal` makes every fork slower
if TYPE_CHECKING:
    from typing import NoReturn

_FIRST_CHECK_SECONDS = 0.05
"""Age at which the resource use of a run is first checked. Most runs finish earlier."""
_CHECK_SECONDS = 0.1
_REAP_SECONDS = 5.0
"""Time for the kernel to end all processes of a killed run. If it takes longer, the reply is sent early, but the slot
is reused only once they have exited."""
_Journal = ctypes.c_char * wire.JOURNAL_BYTES
_MAX_FILES = 4096
"""Maximum of the forkserver's file descriptors. A fork closes all that it may have inherited."""


class Box:
    """The folders and user that the runs of a session share."""

    def __init__(self, slot: int, mounts: int) -> None:
        self.slot = slot
        """Determines its user."""
        self.mounts = mounts
        """Descriptor of the mount namespace with its folders. Each run gets a copy."""


class ForkedRun:
    def __init__(
        self, request: confine.ConfineRequest, slot: int, main: int, init: int, init_fd: int, now: float
    ) -> None:
        self.request = request
        self.slot = slot
        self.main = main
        self.main_fd = os.pidfd_open(main)
        """pidfd of its first process."""
        self.init = init
        """Its pid 1 in the forkserver's namespace; -1 without namespaces."""
        self.init_fd = init_fd
        self.started_at = now
        self.deadline = math.inf if request.kind == wire.INTERPRETER else now + request.wall
        """When to kill it; once it is ending, when to reply at the latest."""
        self.ending = False
        self.limit_hit: int = wire.NO_LIMIT
        self.group: str | None = None
        """Result of `ResourceMonitor.find_group`."""
        self.status = 0
        self.wall = 0.0
        self.cpu = 0.0
        self.peak = 0
        self.folder = -1
        self.answered = False
        """Whether a reply was sent before all its processes exited."""
        self.handed_over = False
        """Whether its first process has exited and others continue, as an interpreter process does."""


class Forkserver:
    """Serves one control channel until it closes."""

    def __init__(self, channel: _socket.socket, config: dict) -> None:
        """`config` is sent by the pool's `worker` module."""
        self._channel = channel
        self._filter = linux.SeccompFilter(bytes.fromhex(config["run_filter"])) if config["run_filter"] else None
        """Filter that each run installs; None if the forkserver has installed all of it."""
        self._policy_hooks = policy_hooks.PolicyHooks(**config["policy"])
        self.loaded, self.missing = _import_modules(config["modules"])
        streams.open_outputs()
        slots: int = config["slots"]
        self._free_slots = list(range(slots))
        self._stacks = linux.Stacks(slots)
        self._reached = mmap.mmap(-1, mmap.PAGESIZE * -(-slots // mmap.PAGESIZE))
        """One byte per slot, shared with the forks: 1 once the run has reached the user's code."""
        self._own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._own_mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._boxes: dict[int, Box] = {}
        self._runs: dict[int, ForkedRun] = {}
        """By request id."""
        self._by_fd: dict[int, ForkedRun] = {}
        """By watched pidfd."""
        self._epoll = select.epoll()
        self._epoll.register(channel, select.EPOLLIN)
        self._next_check = math.inf
        self._isolation = confine.RunIsolation(
            isolated=config["isolated"],
            as_root=config["as_root"],
            uid_base=config["uid_base"],
            scratch=config["scratch"],
            base_memory=_read_memory(0),
        )
        self._monitor = ResourceMonitor(self._isolation.isolated)
        if config["sessions"]:  # its imports are needed only then
            importlib.import_module(f"{__package__}.interpreter_process")
        if config["server_filter"]:
            linux.SeccompFilter(bytes.fromhex(config["server_filter"])).install()

    def serve(self) -> None:
        """Handle messages until the pool closes the channel."""
        channel = self._channel.fileno()
        while True:
            for fd, _ in self._epoll.poll(self._poll_timeout()):
                if fd == channel:
                    if not self._receive():
                        return
                else:
                    self._handle_exit(fd)
            now = time.monotonic()
            for run in [run for run in self._runs.values() if run.deadline <= now]:
                if run.ending:
                    self._answer_early(run)
                else:
                    self._kill(run, wire.WALL)
            if self._next_check <= now:
                self._check_runs(now)

    def _poll_timeout(self) -> float | None:
        """Return the seconds until the next deadline or check; None without one."""
        until = min((self._next_check, *(run.deadline for run in self._runs.values())))
        return None if until == math.inf else max(0.0, until - time.monotonic())

    def _receive(self) -> bool:
        """Handle one message. Returns False when the channel is closed."""
        try:
            message, fds = linux.recv_fds(self._channel, 256, wire.MAX_FDS)
        except ConnectionError:
            return False
        if not message:
            return False
        if message[0] == wire.OP_KILL:
            _, run_id, reason = wire.KILL.unpack(message)
            run = self._runs.get(run_id)
            if run is not None:
                self._kill(run, reason)
            return True
        if message[0] == wire.OP_DROP:
            self._drop_box(wire.KILL.unpack(message)[1])
            return True
        request = confine.ConfineRequest(message)
        try:
            self._start(request, fds)
        except OSError as error:
            os.pwrite(fds[0], wire.failure_journal(error), 0)
            self._channel.send(wire.REPLY.pack(request.id, 0, 1, wire.NO_LIMIT, 0, 0.0, 0.0, 0))
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, request: confine.ConfineRequest, fds: list[int]) -> None:
        now = time.monotonic()
        slot = self._take_slot()
        init = init_fd = -1
        self._reached[slot] = 0
        try:
            box = self._get_box(request)
            if self._isolation.isolated:
                init, init_fd = self._clone_init(request, box, self._stacks.top(slot))
            main = self._fork_into(init_fd)
        except OSError:
            self._kill_init(init, init_fd)
            self._free_slots.append(slot)
            self._drop_box(request.id)
            raise
        if main == 0:
            self._become_run(request, fds, slot, box, init_fd)
        run = ForkedRun(request, slot, main, init, init_fd, now)
        self._runs[request.id] = run
        self._watch(run.main_fd, run)
        if not request.procs_files:  # otherwise the pool checks it
            self._next_check = min(self._next_check, now + _FIRST_CHECK_SECONDS)

    def _take_slot(self) -> int:
        if not self._free_slots:
            raise OSError(errno.EAGAIN, "all slots of the forkserver are in use")
        return self._free_slots.pop()

    def _get_box(self, request: confine.ConfineRequest) -> Box | None:
        """Return the box of a session's run; if it names none, a new one without mounts. None without a session."""
        if request.kind == wire.PROGRAM:
            return None
        if request.box:
            box = self._boxes.get(request.box)
            if box is None:
                raise OSError(errno.ESTALE, f"box {request.box} does not exist")
            return box
        self._boxes[request.id] = box = Box(self._take_slot(), -1)
        return box

    def _drop_box(self, box_id: int) -> None:
        box = self._boxes.pop(box_id, None)
        if box is not None:
            self._free_slots.append(box.slot)
            if box.mounts >= 0:
                os.close(box.mounts)

    def _clone_init(self, request: confine.ConfineRequest, box: Box | None, stack: int) -> tuple[int, int]:
        """Start a run's pid 1 in new namespaces."""
        flags = linux.CLONE_NEWPID | linux.CLONE_NEWNS
        if box is None:
            return linux.clone_idle(stack, flags)
        if box.mounts < 0:
            init, init_fd = linux.clone_reaper(stack, flags)
            box.mounts = os.open(f"/proc/{init}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            return init, init_fd
        linux.setns(box.mounts, linux.CLONE_NEWNS)
        try:
            return linux.clone_reaper(stack, flags)
        finally:
            linux.setns(self._own_mounts, linux.CLONE_NEWNS)

    def _fork_into(self, init_fd: int) -> int:
        """Fork into the pid namespace of the process behind `init_fd`."""
        if init_fd < 0:
            return linux.fork()
        linux.setns(init_fd, linux.CLONE_NEWPID)
        pid = -1
        try:
            pid = linux.fork()
        finally:
            if pid != 0:
                linux.setns(self._own_namespace, linux.CLONE_NEWPID)
        return pid

    @staticmethod
    def _kill_init(init: int, init_fd: int) -> None:
        if init_fd >= 0:
            _signal.pidfd_send_signal(init_fd, _signal.SIGKILL)
            os.waitpid(init, 0)
            os.close(init_fd)

    def _become_run(
        self, request: confine.ConfineRequest, fds: list[int], slot: int, box: Box | None, init_fd: int
    ) -> NoReturn:
        """Run the user's code in the fork. Never returns into the forkserver's loop."""
        status = 125
        try:
            journal = linux.map_shared(fds[0], _Journal).cast("Q")
            try:
                main, job = self._prepare(request, fds, slot, box, init_fd, journal)
            except (OSError, MemoryError, ValueError) as error:
                state = wire.FILES_REJECTED if isinstance(error, program.FilesRejectedError) else wire.SETUP_FAILED
                failure = wire.failure_journal(error, state)
                journal.cast("B")[: len(failure)] = failure
                os._exit(status)
            journal[wire.STATE] = wire.STARTED
            if request.kind == wire.COMMAND:
                shell_command.become(job.code)
            if request.kind == wire.INTERPRETER:
                streams.attach(None, 0)
                linux.unmap(journal.cast("B"))
                sys.modules[f"{__package__}.interpreter_process"].serve_session(main, self._policy_hooks)
            status = program.finish(main, program.execute(job.code, main, self._policy_hooks))
        finally:
            os._exit(status)

    def _prepare(
        self,
        request: confine.ConfineRequest,
        fds: list[int],
        slot: int,
        box: Box | None,
        init_fd: int,
        journal: memoryview,
    ) -> tuple[program.types.ModuleType, program.SandboxJob]:
        """Confine this process, write the run's files, open its streams, and close everything of the forkserver."""
        confine.join_groups(fds[len(fds) - request.procs_files :])
        job = program.read_job(fds[0])
        for fd in (1, 2):
            os.dup2(fds[fd], fd)
        # Not a shared file description, whose flags a run could change for the next one.
        has_stdin = len(fds) - request.procs_files > 3
        os.dup2(fds[3] if has_stdin else os.open(os.devnull, os.O_RDONLY), 0)
        if not self._isolation.isolated:
            self._make_scratch(slot)
        confine.enter(self._isolation, request, slot if box is None else box.slot, init_fd)
        script = {wire.SCRIPT_NAME: job.code} if request.kind == wire.PROGRAM else {}
        program.write_files({**script, **job.files})
        main = program.new_main_module()
        program.make_independent()
        streams.attach(streams.Journal(journal), request.output)
        confine.limit_open_files(request)
        if self._filter:
            self._filter.install()
        os.closerange(3, _MAX_FILES)
        self._reached[slot] = 1
        self._reached.close()
        gc.enable()
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        return main, job

    def _make_scratch(self, slot: int) -> None:
        box = f"{self._isolation.scratch}/{slot}"
        _remove_folder(box)
        os.mkdir(box, 0o700)
        os.environ.update(HOME=f"{box}/work", TMPDIR=f"{box}/tmp")

    def _watch(self, fd: int, run: ForkedRun) -> None:
        self._by_fd[fd] = run
        self._epoll.register(fd, select.EPOLLIN)

    def _handle_exit(self, fd: int) -> None:
        run = self._by_fd.pop(fd, None)
        if run is None:
            return
        self._epoll.unregister(fd)
        if fd == run.main_fd:
            self._handle_main_exit(run)
        else:
            os.waitpid(run.init, 0)
            self._reply(run)

    def _handle_main_exit(self, run: ForkedRun) -> None:
        _, run.status, use = os.wait4(run.main, 0)
        os.close(run.main_fd)
        if run.request.kind == wire.INTERPRETER and not run.ending:
            run.handed_over = True
            return
        now = time.monotonic()
        run.wall = now - run.started_at
        run.ending = True
        run.deadline = math.inf if run.answered else now + _REAP_SECONDS
        run.cpu = max(run.cpu, use.ru_utime + use.ru_stime)
        run.peak = max(run.peak, use.ru_maxrss << 10)
        if run.request.fetch and not run.answered:
            run.folder = self._open_folder(run)
        if not self._isolation.isolated:
            _kill_session(run.main)
            self._reply(run)
            return
        _signal.pidfd_send_signal(run.init_fd, _signal.SIGKILL)
        self._watch(run.init_fd, run)

    def _open_folder(self, run: ForkedRun) -> int:
        """Open the run's folder through its pid 1, whose root only the forkserver can change; -1 if it is missing."""
        root = f"/proc/{run.init}/root" if self._isolation.isolated else ""
        try:
            return os.open(root + self._isolation.work_directory(run.slot), os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return -1

    def _reply(self, run: ForkedRun) -> None:
        """Reply that all processes of the run have exited, and free its slot."""
        if not self._isolation.isolated and run.folder < 0:  # otherwise the pool still reads it
            _remove_folder(f"{self._isolation.scratch}/{run.slot}")
        if not run.answered:
            self._answer(run)
        if run.init_fd >= 0:
            os.close(run.init_fd)
        del self._runs[run.request.id]
        self._free_slots.append(run.slot)

    def _answer(self, run: ForkedRun) -> None:
        reply = wire.REPLY.pack(
            run.request.id,
            self._reached[run.slot],
            not run.answered,
            run.limit_hit,
            run.status,
            run.wall,
            run.cpu,
            run.peak,
        )
        linux.send_fds(self._channel, reply, [run.folder] if run.folder >= 0 else [])
        if run.folder >= 0:
            os.close(run.folder)

    def _answer_early(self, run: ForkedRun) -> None:
        """Reply for a killed run whose processes have not all exited. It no longer runs its own code: it waits for the
        kernel, or for a child that was reparented to the forkserver and is reaped here."""
        run.deadline = math.inf
        run.answered = True
        if run.wall == 0.0:  # its first process has not exited either
            run.wall = time.monotonic() - run.started_at
            run.status = _signal.SIGKILL
        self._answer(run)
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        known = {pid for run in self._runs.values() for pid in (run.main, run.init)}
        with open("/proc/thread-self/children", encoding="ascii") as file:
            orphans = {int(pid) for pid in file.read().split()} - known
        for pid in orphans:
            os.waitpid(pid, os.WNOHANG)

    def _kill(self, run: ForkedRun, reason: int) -> None:
        """Kill all processes of a run. Only the first `reason` is reported."""
        if run.ending:
            return
        run.ending = True
        run.limit_hit = reason
        run.deadline = time.monotonic() + _REAP_SECONDS
        if self._isolation.isolated:
            _signal.pidfd_send_signal(run.init_fd, _signal.SIGKILL)
            if run.handed_over:
                self._watch(run.init_fd, run)
        else:
            _kill_session(run.main)
            _signal.pidfd_send_signal(run.main_fd, _signal.SIGKILL)

    def _check_runs(self, now: float) -> None:
        """Enforce the limits over all processes of each run, except for new runs."""
        self._next_check = now + _CHECK_SECONDS if self._runs else math.inf
        old = [run for run in self._runs.values() if now - run.started_at >= _FIRST_CHECK_SECONDS and not run.ending]
        if not old:
            return
        uses = self._monitor.measure({os.getpid(), *(run.init for run in self._runs.values())})
        for run in old:
            run.group = run.group or self._monitor.find_group(run.init if self._isolation.isolated else run.main)
            use = uses.get(run.group or "")
            if use is not None:
                self._enforce_limits(run, use)

    def _enforce_limits(self, run: ForkedRun, use: Use) -> None:
        run.cpu = max(run.cpu, use.cpu_seconds)
        if run.request.cpu and use.cpu_seconds >= run.request.cpu:
            self._kill(run, wire.CPU)
        elif len(use.pids) > 1 and self._exceeds_memory(run, use):
            self._kill(run, wire.MEMORY)

    def _exceeds_memory(self, run: ForkedRun, use: Use) -> bool:
        limit = run.request.memory
        # The sum counts shared pages repeatedly, so measure exactly before killing.
        return use.memory_bytes > limit and self._monitor.proportional_bytes(use.pids) > limit


def _kill_session(leader: int) -> None:
    try:
        os.killpg(leader, _signal.SIGKILL)
    except ProcessLookupError:  # all have exited, or the leader has not called setsid yet
        return


def _remove_folder(folder: str) -> None:
    import shutil  # only without isolation: it loads three libraries, which make every fork slower

    shutil.rmtree(folder, ignore_errors=True)


def _import_modules(modules: list[str]) -> tuple[list[str], dict[str, str]]:
    """Import `modules` for all runs, and return the imported ones and the errors of the others, which runs may import
    themselves. Raises RuntimeError if one started a thread, which a fork does not copy."""
    loaded: list[str] = []
    missing: dict[str, str] = {}
    for name in modules:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
            loaded.append(name)
        except Exception as error:  # noqa: BLE001  (third-party imports may raise anything)
            missing[name] = f"{type(error).__name__}: {error}"
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"one of the warm modules {loaded} starts threads, which a fork does not copy; leave it out")
    return loaded, missing


def _raise_oom_score() -> None:
    """Make the kernel kill forkservers before the server, and after runs (`confine.prefer_as_oom_victim`)."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("300")
    except OSError:  # not permitted on this host
        return


def _read_memory(field: int) -> int:
    """Return the bytes of this process: address space (field 0) or resident (field 1)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[field]) * mmap.PAGESIZE


def main(channel_fd: int) -> None:
    """Start as the pool's first message says, report the result, and serve."""
    linux.name_process(b"sandbox")
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    channel = _socket.socket(fileno=channel_fd)
    config = wire.read_first_message(channel.recv(1 << 20))
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    os.environ.pop("LD_BIND_NOW", None)  # meant for this process only: it makes forks resolve each function again
    try:
        _raise_oom_score()
        _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_MAX_FILES, maximum), maximum))
        if config["as_root"]:
            os.setgroups([])
        server = Forkserver(channel, config)
    except (OSError, RuntimeError, ValueError) as error:
        channel.send(wire.first_message({"error": f"{type(error).__name__}: {error}"}))
        return
    warmup.warm_up()
    gc.collect()
    gc.disable()
    gc.freeze()
    linux.trim_heap()
    linux.collapse_heap()
    imported = sorted({name.partition(".")[0] for name in sys.modules})
    ready = {"loaded": server.loaded, "missing": server.missing, "imported": imported, "resident": _read_memory(1)}
    channel.send(wire.first_message(ready))
    server.serve()
