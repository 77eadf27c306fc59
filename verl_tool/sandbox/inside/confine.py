"""From a fresh fork of the forkserver to a place where the user's code may run."""

from __future__ import annotations

import os
import resource

from . import linux, wire

_GIVES_WAY = 5
"""Niceness of a run: the forkserver, which ends runs, and the server go first."""
_NO_CORE = 1
"""Bytes of core file. Zero would still start a crash handler that the host has piped cores to; one does not."""
_MEMORY_LOCKED = 1 << 16
_SIGNALS_PENDING = 256
"""Queued signals and POSIX timers."""
_STACK = 64 << 20
_CORES = os.cpu_count() or 1
_LONGEST_CPU_SECONDS = 1 << 30


class RunIsolation:
    """The isolation that a forkserver gives its runs; the same for all of them."""

    def __init__(self, isolated: bool, as_root: bool, uid_base: int, scratch: str, base_memory: int) -> None:
        self.isolated = isolated
        """Whether there are namespaces; False only at the level ``none``."""
        self.as_root = as_root
        """Whether each run gets a uid of its own; else an empty user namespace."""
        self.uid_base = uid_base
        """The uid of slot 0."""
        self.scratch = scratch
        """Where runs have their folders if there are no namespaces."""
        self.base_memory = base_memory
        """Bytes of address space that the warmed interpreter takes by itself."""

    def work_directory(self, slot: int) -> str:
        return wire.WORK_DIRECTORY if self.isolated else f"{self.scratch}/{slot}/work"


class ConfineRequest:
    """One run, as the pool asked for it."""

    def __init__(self, message: bytes) -> None:
        """`message`: packed as `wire.RUN`."""
        _, self.id, self.wall, self.cpu, self.memory, self.processes, *others = wire.RUN.unpack(message)
        self.open_files, self.output, self.disk, self.disk_files, self.fetch, self.procs_files, *others = others
        self.kind, self.box = others


def join_groups(procs_files: list[int]) -> None:
    """Have this process counted by the run's control group from now on. Raises OSError."""
    for procs_file in procs_files:
        os.write(procs_file, b"0")


def die_first() -> None:
    """If memory runs out, runs are to die before their forkserver, and that before anything else."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    except OSError:  # not ours to say here
        return
    os.write(fd, b"1000")
    os.close(fd)


def enter(place: RunIsolation, request: ConfineRequest, slot: int, init_fd: int) -> None:
    """Confine this process for good, all but the seccomp filter. Raises OSError if the kernel refuses any of it.

    `slot`: of the run, or of the box that it shares.
    """
    die_first()
    os.setsid()  # where the kernel groups by session, a run with many busy processes gets no more than one with one
    if place.isolated:
        _enter_namespaces(place, request, slot, init_fd)
    os.nice(_GIVES_WAY)
    work = place.work_directory(slot)
    if not request.box:
        for name in ("work", "tmp", "shm"):
            os.mkdir(os.path.join(os.path.dirname(work), name), 0o700)
    try:
        os.chdir(work)
    except OSError:
        if not request.box:
            raise
        os.chdir("/")  # the session's programs have removed or locked it
    set_limits(place, request)


def _enter_namespaces(place: RunIsolation, request: ConfineRequest, slot: int, init_fd: int) -> None:
    """Join the mount namespace of the run's pid 1, mount its own folders there, and give up every privilege."""
    linux.setns(init_fd, linux.CLONE_NEWNS)
    uid = place.uid_base + slot if place.as_root else 0
    if not request.box:
        mount_box(uid, request.disk, request.disk_files)
    # Read-only: who dies first when memory runs out, for one, is not a run's own to set (`oom_score_adj`).
    flags = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount(b"proc", b"/proc", flags, None)
    drop_privileges(place.as_root, uid)


def mount_box(uid: int, disk_bytes: int, disk_files: int) -> None:
    """Mount the folder that a run may write to. Raises OSError."""
    options = f"size={disk_bytes},nr_inodes={disk_files},mode=0755,uid={uid},gid={uid}"
    linux.mount(b"tmpfs", b"/box", linux.MS_NOSUID | linux.MS_NODEV, options.encode())


def drop_privileges(as_root: bool, uid: int) -> None:
    """Give up every privilege for good: for a user of its own, or that of an empty user namespace. Raises OSError."""
    if as_root:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    else:
        linux.unshare(linux.CLONE_NEWUSER)
        linux.drop_capabilities()


def set_limits(place: RunIsolation, request: ConfineRequest) -> None:
    """The kernel's own limits, per process, but that of open files (`limit_open_files`). `resource_monitor` adds those
    over all processes of a run."""

    def limit(what: int, value: int) -> None:
        resource.setrlimit(what, (value, value))

    limit(resource.RLIMIT_CORE, _NO_CORE)
    limit(resource.RLIMIT_FSIZE, max(request.disk, request.output))
    limit(resource.RLIMIT_AS, request.memory + place.base_memory)
    limit(resource.RLIMIT_NPROC, request.processes)
    limit(resource.RLIMIT_MEMLOCK, _MEMORY_LOCKED)
    limit(resource.RLIMIT_MSGQUEUE, 0)
    limit(resource.RLIMIT_SIGPENDING, _SIGNALS_PENDING)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, _STACK))
    # Per process and in whole seconds: a second line behind `resource_monitor` and the wall limit.
    seconds = int(min(request.cpu or request.wall * _CORES, _LONGEST_CPU_SECONDS)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def limit_open_files(request: ConfineRequest) -> None:
    """The last thing before the forkserver's own files are closed: while they are open, a new one has a number above
    the limit, which the kernel refuses."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (request.open_files, request.open_files))
