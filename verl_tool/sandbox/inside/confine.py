"""Confine a fresh fork of the forkserver, so that the user's code may run in it."""

from __future__ import annotations

import os
import resource

from . import linux, wire

_NICENESS = 5
"""Niceness of a run. The forkserver, which kills runs, and the server take precedence."""
_NO_CORE = 1
"""Size limit of core files in bytes. With 0, a crash handler to which the host pipes core dumps would still start."""
_MEMORY_LOCKED = 1 << 16
_SIGNALS_PENDING = 256
"""Queued signals and POSIX timers."""
_STACK = 64 << 20
_CORES = os.cpu_count() or 1
_MAX_CPU_SECONDS = 1 << 30


class RunIsolation:
    """Settings of the isolation, equal for all runs of a forkserver."""

    def __init__(self, isolated: bool, as_root: bool, uid_base: int, scratch: str, base_memory: int) -> None:
        self.isolated = isolated
        """Whether there are namespaces; False only at the level ``none``."""
        self.as_root = as_root
        """Whether each run gets a separate uid. Otherwise it gets an empty user namespace."""
        self.uid_base = uid_base
        """The uid of slot 0."""
        self.scratch = scratch
        """Folder for the runs' folders without namespaces."""
        self.base_memory = base_memory
        """Address space of the warmed interpreter without a run."""

    def work_directory(self, slot: int) -> str:
        return wire.WORK_DIRECTORY if self.isolated else f"{self.scratch}/{slot}/work"


class ConfineRequest:
    """The pool's request for one run."""

    def __init__(self, message: bytes) -> None:
        """`message`: packed as `wire.RUN`."""
        _, self.id, self.wall, self.cpu, self.memory, self.processes, *others = wire.RUN.unpack(message)
        self.open_files, self.output, self.disk, self.disk_files, self.fetch, self.procs_files, *others = others
        self.kind, self.box = others


def join_groups(procs_files: list[int]) -> None:
    """Move this process into the run's control groups. Raises OSError."""
    for procs_file in procs_files:
        os.write(procs_file, b"0")


def prefer_as_oom_victim() -> None:
    """Make the kernel kill runs first when memory runs out, then forkservers, and only then other processes."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    except OSError:  # not permitted on this host
        return
    os.write(fd, b"1000")
    os.close(fd)


def enter(isolation: RunIsolation, request: ConfineRequest, slot: int, init_fd: int) -> None:
    """Confine this process permanently, except for the seccomp filter. Raises OSError if the kernel rejects a step.

    `slot` is that of the run, or of the box that it shares.
    """
    prefer_as_oom_victim()
    os.setsid()  # with autogroup scheduling, a run with many processes gets no more CPU time than one with a single one
    if isolation.isolated:
        _enter_namespaces(isolation, request, slot, init_fd)
    os.nice(_NICENESS)
    work = isolation.work_directory(slot)
    if not request.box:
        for name in ("work", "tmp", "shm"):
            os.mkdir(os.path.join(os.path.dirname(work), name), 0o700)
    try:
        os.chdir(work)
    except OSError:
        if not request.box:
            raise
        os.chdir("/")  # the session's programs have removed or locked it
    set_limits(isolation, request)


def _enter_namespaces(isolation: RunIsolation, request: ConfineRequest, slot: int, init_fd: int) -> None:
    """Join the mount namespace of the run's pid 1, mount the run's folders there, and drop all privileges."""
    linux.setns(init_fd, linux.CLONE_NEWNS)
    uid = isolation.uid_base + slot if isolation.as_root else 0
    if not request.box:
        mount_box(uid, request.disk, request.disk_files)
    # Read-only: a run must not change settings such as its `oom_score_adj`.
    flags = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount(b"proc", b"/proc", flags, None)
    drop_privileges(isolation.as_root, uid)


def mount_box(uid: int, disk_bytes: int, disk_files: int) -> None:
    """Mount the writable folder of a run. Raises OSError."""
    options = f"size={disk_bytes},nr_inodes={disk_files},mode=0755,uid={uid},gid={uid}"
    linux.mount(b"tmpfs", b"/box", linux.MS_NOSUID | linux.MS_NODEV, options.encode())


def drop_privileges(as_root: bool, uid: int) -> None:
    """Drop all privileges permanently, for a separate user or for an empty user namespace. Raises OSError."""
    if as_root:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:
        linux.unshare(linux.CLONE_NEWUSER)
        linux.drop_capabilities()


def set_limits(isolation: RunIsolation, request: ConfineRequest) -> None:
    """Set the kernel's limits per process, except for open files (`limit_open_files`). `resource_monitor` enforces
    limits over all processes of a run."""

    def limit(what: int, value: int) -> None:
        resource.setrlimit(what, (value, value))

    limit(resource.RLIMIT_CORE, _NO_CORE)
    limit(resource.RLIMIT_FSIZE, max(request.disk, request.output))
    limit(resource.RLIMIT_AS, request.memory + isolation.base_memory)
    limit(resource.RLIMIT_NPROC, request.processes)
    limit(resource.RLIMIT_MEMLOCK, _MEMORY_LOCKED)
    limit(resource.RLIMIT_MSGQUEUE, 0)
    limit(resource.RLIMIT_SIGPENDING, _SIGNALS_PENDING)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, _STACK))
    # Per process and in whole seconds, as a fallback for `resource_monitor` and the wall limit.
    seconds = int(min(request.cpu or request.wall * _CORES, _MAX_CPU_SECONDS)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def limit_open_files(request: ConfineRequest) -> None:
    """Limit open files, right before the forkserver's files are closed: while they are open, the number of a new file
    would be above the limit, which the kernel rejects."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (request.open_files, request.open_files))
