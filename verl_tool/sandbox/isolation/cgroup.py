"""Control groups (cgroups(7)): the kernel limits the memory of a run and counts its CPU time.

A pool has a group with a limit of its total memory. Below it, there is a group for the forkservers and one for each run
in progress. The groups of runs are reused. Version 2 is used if its controllers are delegated to this process, and
otherwise version 1.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verl_tool.sandbox.limits import Limits

_ROOT = "/sys/fs/cgroup"
_PREFIX = "verl-tool-"
_NAME = re.compile(_PREFIX + r"(?P<mark>[0-9a-f]{16})-(?P<salt>[0-9a-f]{12})[0-9]*")
"""Name of a pool's groups. It identifies the owner by a hash, which reveals nothing to the code in the groups."""
_REMOVE_SECONDS = 5.0
_FORKSERVERS = "forkservers"
_MAX_WEIGHT = 10_000
"""Maximum weight in version 2."""
_OVERHEAD_BYTES = 16 << 20
"""Memory of page tables and similar structures, which the kernel counts for the group."""
_GROUP_STEP = 64 << 20
_FREE_OPEN = 8
"""Number of unused groups whose files stay open."""
_V2_CONTROLLERS = "+memory +cpu"


@dataclass(frozen=True)
class Version:
    """Names and units of the files in a version of control groups."""

    procs_file: str
    """File to which a process of one thread writes to join. In version 1, this is the file for threads, because joining
    a whole process would wait for all forks and execs on the machine."""
    memory_limit: str
    memory_used: str
    events: str
    """File with the number of processes killed for memory, in the line `oom_kill`."""
    refusals: tuple[str, str]
    """File, and its line if there are several, with the number of times that the group's limit was reached."""
    cpu_used: tuple[str, str]
    cpu_units: float
    """Units of `cpu_used` per second."""
    weight: str
    weight_unit: int
    """Default CPU weight of a process and of a group."""
    once: tuple[tuple[str, str], ...]
    """Files and values to write when the group of a run is made, if the kernel supports them."""


_V1 = Version(
    procs_file="tasks",
    memory_limit="memory.limit_in_bytes",
    memory_used="memory.usage_in_bytes",
    events="memory.oom_control",
    refusals=("memory.failcnt", ""),
    cpu_used=("cpuacct.usage", ""),
    cpu_units=1e9,
    weight="cpu.shares",
    weight_unit=1024,
    once=(("memory.swappiness", "0"),),
)
_V2 = Version(
    procs_file="cgroup.procs",
    memory_limit="memory.max",
    memory_used="memory.current",
    events="memory.events",
    refusals=("memory.events", "max"),
    cpu_used=("cpu.stat", "usage_usec"),
    cpu_units=1e6,
    weight="cpu.weight",
    weight_unit=100,
    once=(("memory.swap.max", "0"), ("memory.oom.group", "1")),
)


class _Files:
    """Files of one group. Each is opened once, since opening takes ten times as long as reading."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def number(self, folder: str, name: str, line: str) -> int:
        """Read the number in a file, or in its line that begins with the word `line`."""
        text = os.pread(self.descriptor(f"{folder}/{name}", os.O_RDONLY), 4096, 0)
        if line:
            text = (b"\n" + text).partition(b"\n%s " % line.encode("ascii"))[2].partition(b"\n")[0]
        return int(text or 0)

    def descriptor(self, path: str, access: int) -> int:
        """Return the descriptor of a file, which stays open."""
        if path not in self._open:
            self._open[path] = os.open(path, access | os.O_CLOEXEC)
        return self._open[path]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class RunGroup:
    """A group for one run at a time. Call `prepare` before each."""

    def __init__(self, version: Version, memory: str, cpu: str, accounting: str) -> None:
        """Make the folders of the controllers, which are the same in version 2. Raises OSError, without remains."""
        self._version = version
        self._memory, self._cpu, self._accounting = memory, cpu, accounting
        self._folders = tuple(dict.fromkeys((memory, cpu, accounting)))
        self._files = _Files()
        self._limit = 0
        self.max_memory = 0
        """Maximum number of bytes that `look` found."""
        try:
            for folder in self._folders:
                os.mkdir(folder)
            for name, value in version.once:
                with contextlib.suppress(OSError):  # not supported by this kernel
                    _write(memory, name, value)
            self._before = self._counts()
        except OSError:
            self.remove(time.monotonic())
            raise

    def prepare(self, memory_bytes: int) -> None:
        """Set the limit and reset all counts."""
        if memory_bytes != self._limit:
            _write(self._memory, self._version.memory_limit, str(memory_bytes))
            self._limit = memory_bytes
        self.max_memory = 0
        self._before = self._counts()

    def forgive(self) -> None:
        """Reset the counts of memory, but not the CPU time."""
        self._before = (self._kills(), self._refusals(), self._before[2])

    def procs_files(self) -> list[int]:
        """Return descriptors to which a process writes ``0`` to join the group. The group closes them."""
        return [self._files.descriptor(f"{folder}/{self._version.procs_file}", os.O_WRONLY) for folder in self._folders]

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its processes since `prepare`, including exited ones."""
        return (self._cpu_used() - self._before[2]) / self._version.cpu_units

    def look(self) -> None:
        """Measure the memory in use for `max_memory`."""
        self.max_memory = max(self.max_memory, self.memory_now())

    def memory_now(self) -> int:
        return self._files.number(self._memory, self._version.memory_used, "")

    def lost_process(self) -> bool:
        """Return whether the kernel has killed one of its processes for memory."""
        return self._kills() > self._before[0]

    def exceeded_memory(self) -> bool:
        """Return whether the group's limit was reached, so that its own use was the reason for a kill."""
        return self._refusals() > self._before[1]

    def _counts(self) -> tuple[int, int, int]:
        return self._kills(), self._refusals(), self._cpu_used()

    def _kills(self) -> int:
        return self._files.number(self._memory, self._version.events, "oom_kill")

    def _refusals(self) -> int:
        return self._files.number(self._memory, *self._version.refusals)

    def _cpu_used(self) -> int:
        return self._files.number(self._accounting, *self._version.cpu_used)

    def close_files(self) -> None:
        """Close its descriptors. A file is opened again when it is needed."""
        self._files.close()

    def remove(self, deadline: float) -> None:
        """Remove its folders after its last process has exited, until `deadline` (of `time.monotonic`)."""
        self.close_files()
        for folder in self._folders:
            _remove(folder, deadline)


class ControlGroup:
    """The groups of one pool."""

    def __init__(self, version: Version, memory: str, cpu: str, accounting: str) -> None:
        """The arguments are the folders below which groups can be made, by controller."""
        self._version = version
        salt = os.urandom(6).hex()
        name = f"{_PREFIX}{_mark(_started(os.getpid()), salt)}-{salt}"
        self._memory = f"{memory}/{name}"
        self._cpu, self._accounting = f"{cpu}/{name}", f"{accounting}/{name}"
        self._folders = tuple(dict.fromkeys((self._memory, self._cpu, self._accounting)))
        self._made: list[RunGroup] = []
        self._free: list[RunGroup] = []
        self._files = _Files()

    @classmethod
    def create(cls, memory_bytes: int) -> ControlGroup | None:
        """Make the groups of a pool with this limit of memory. None if this process is not allowed to."""
        for version, places in _candidates():
            if not all(os.access(f"{place}/cgroup.procs", os.W_OK) for place in places):
                continue
            for place in set(places):
                _remove_orphans(place)
            group = cls(version, *places)
            try:
                group._build(memory_bytes)
                return group
            except OSError:
                group.remove()
        return None

    def _build(self, memory_bytes: int) -> None:
        for folder in self._folders:
            os.mkdir(folder)
        _write(self._memory, self._version.memory_limit, str(memory_bytes))
        if self._version is _V2:
            _write(self._memory, "cgroup.subtree_control", _V2_CONTROLLERS)
        os.mkdir(f"{self._memory}/{_FORKSERVERS}")
        self.give(self.take(memory_bytes))  # check that groups of runs can be made
        # All runs together get the weight of one busy process per core, so that the server and the forkservers get CPU
        # time too. The runs have equal shares, however many processes they start.
        weight = min(self._version.weight_unit * len(os.sched_getaffinity(0)), _MAX_WEIGHT)
        _write(self._cpu, self._version.weight, str(weight))

    def joining(self, command: list[str]) -> list[str]:
        """Extend `command` so that it joins the group of forkservers when it starts."""
        procs = f"{self._memory}/{_FORKSERVERS}/cgroup.procs"
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', procs, *command]

    def memory_now(self) -> int:
        """Return the memory of all its groups in bytes, including those of forkservers. Raises OSError."""
        return self._files.number(self._memory, self._version.memory_used, "")

    def take(self, memory_bytes: int) -> RunGroup:
        """Take a group for a run with this limit. Raises OSError if no more groups can be made."""
        while self._free:
            group = self._free.pop()
            try:
                group.prepare(memory_bytes)
                return group
            except OSError:  # it was removed from outside
                group.close_files()
        number = len(self._made)
        group = RunGroup(
            self._version, f"{self._memory}/{number}", f"{self._cpu}{number}", f"{self._accounting}{number}"
        )
        self._made.append(group)
        group.prepare(memory_bytes)
        return group

    def give(self, group: RunGroup, *, gone: bool = True) -> None:
        """Return the group of a run. It is reused only if all processes of the run are `gone`."""
        if gone:
            self._free.append(group)
            # The last group is the first to be reused, so the files of older ones need not stay open.
            if len(self._free) > _FREE_OPEN:
                self._free[-_FREE_OPEN - 1].close_files()
        else:
            group.close_files()

    def remove(self) -> None:
        """Remove all groups after the last process has exited."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        self._files.close()
        for group in self._made:
            group.remove(deadline)
        for folder in (f"{self._memory}/{_FORKSERVERS}", *self._folders):
            _remove(folder, deadline)


def group_bytes(resident_bytes: int, limits: Limits) -> int:
    """Return the memory limit of a run's group: its memory, its files, and a copy of the warm interpreter.

    `resident_bytes` is the memory of the interpreter. The result is rounded up, so that it is the same for all workers
    of a kind and a group need not be changed.
    """
    total = limits.memory_bytes + limits.disk_bytes + resident_bytes + _OVERHEAD_BYTES
    return -(-total // _GROUP_STEP) * _GROUP_STEP


def _candidates() -> Iterator[tuple[Version, Sequence[str]]]:
    """Yield the folders where groups may be possible, for memory, CPU and accounting of CPU time."""
    if os.path.exists(f"{_ROOT}/cgroup.controllers"):
        own = _ROOT + _own_path().rstrip("/")
        # Below the root, a folder contains either processes or groups. So a service uses the folder above its own.
        for folder in dict.fromkeys((own, os.path.dirname(own), _ROOT)):
            if folder.startswith(_ROOT) and _delegates(folder):
                yield _V2, (folder, folder, folder)
    yield _V1, tuple(f"{_ROOT}/{controller}" for controller in ("memory", "cpu", "cpuacct"))


def _own_path() -> str:
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        return next((line.strip().partition("::")[2] for line in file if line.startswith("0::")), "")
    return ""


def _delegates(folder: str) -> bool:
    """Return whether groups below a folder have the controllers, or can get them."""
    with contextlib.suppress(OSError):
        _write(folder, "cgroup.subtree_control", _V2_CONTROLLERS)
        return True
    return False


def _write(folder: str, name: str, value: str) -> None:
    fd = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode("ascii"))
    finally:
        os.close(fd)


def _remove(folder: str, deadline: float) -> None:
    while os.path.isdir(folder):
        try:
            os.rmdir(folder)
        except OSError:  # busy until the kernel has removed the last process
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)


def _remove_orphans(place: str) -> None:
    """Remove the groups of servers that were killed before they removed them."""
    found = [match for name in os.listdir(place) if (match := _NAME.fullmatch(name))]
    live = {_started(int(name)) for name in os.listdir("/proc") if found and name.isdigit()}
    for group in found:
        if group["mark"] not in {_mark(process, group["salt"]) for process in live}:
            for folder, _, _ in os.walk(os.path.join(place, group[0]), topdown=False):
                with contextlib.suppress(OSError):  # not empty yet, or removed by another server
                    os.rmdir(folder)


def _started(pid: int) -> str:
    """Return the pid and the start time of a process, which identify it until a reboot. Empty if it has exited."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return f"{pid} {file.read().rpartition(')')[2].split()[19]}"
    return ""


def _mark(process: str, salt: str) -> str:
    return hashlib.sha256(f"{process} {salt}".encode()).hexdigest()[:16]
