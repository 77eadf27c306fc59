"""Control groups (cgroups(7)): memory and CPU time of a run, held and counted by the kernel.

A pool has a group with a ceiling over all its memory, and below it one for its forkservers and one for each run that
goes on. The groups of runs are made once and used again. Version 2 is used where its controllers are delegated to this
process, else version 1.
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
"""Of the groups of a pool: by whom they were made, in a form that tells nothing to the code that runs in them."""
_REMOVE_SECONDS = 5.0
_FORKSERVERS = "forkservers"
_MAX_WEIGHT = 10_000
"""That version 2 takes."""
_OVERHEAD_BYTES = 16 << 20
"""Page tables and the like, which the kernel counts as a run's memory too."""
_GROUP_STEP = 64 << 20
_FREE_OPEN = 8
"""Groups without a run whose files stay open."""
_V2_CONTROLLERS = "+memory +cpu"


@dataclass(frozen=True)
class Version:
    """Names and units of what a version of control groups offers."""

    procs_file: str
    """Written to by a process of one thread that joins. Version 1 lets a thread join, for which the kernel does not
    wait until no other process on the machine is in the middle of a fork or an exec."""
    memory_limit: str
    memory_used: str
    events: str
    """The file that counts processes killed for memory, in the line `oom_kill`."""
    refusals: tuple[str, str]
    """The file, and the line in it if it has several, that counts how often a group's own limit was reached."""
    cpu_used: tuple[str, str]
    cpu_units: float
    """Of `cpu_used` in a second."""
    weight: str
    weight_unit: int
    """Share of the CPU that the kernel gives to a process, and to a group unless it is told otherwise."""
    once: tuple[tuple[str, str], ...]
    """Files of a run's group that are set when it is made, where the kernel has them."""


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
    """Files of one group, each opened once: to open one takes ten times as long as to read it."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def number(self, folder: str, name: str, line: str) -> int:
        """The number in a file, or in the line of it that begins with the word `line`."""
        text = os.pread(self.descriptor(f"{folder}/{name}", os.O_RDONLY), 4096, 0)
        if line:
            text = (b"\n" + text).partition(b"\n%s " % line.encode("ascii"))[2].partition(b"\n")[0]
        return int(text or 0)

    def descriptor(self, path: str, access: int) -> int:
        """The file's descriptor, which stays open."""
        if path not in self._open:
            self._open[path] = os.open(path, access | os.O_CLOEXEC)
        return self._open[path]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class RunGroup:
    """The group of one run at a time. `prepare` it for each."""

    def __init__(self, version: Version, memory: str, cpu: str, accounting: str) -> None:
        """The folders of each controller: the same one in version 2. Raises OSError, and then leaves nothing behind."""
        self._version = version
        self._memory, self._cpu, self._accounting = memory, cpu, accounting
        self._folders = tuple(dict.fromkeys((memory, cpu, accounting)))
        self._files = _Files()
        self._limit = 0
        self.max_memory = 0
        """Bytes, as far as seen: the most that `look` found."""
        try:
            for folder in self._folders:
                os.mkdir(folder)
            for name, value in version.once:
                with contextlib.suppress(OSError):  # this kernel does without
                    _write(memory, name, value)
            self._before = self._counts()
        except OSError:
            self.remove(time.monotonic())
            raise

    def prepare(self, memory_bytes: int) -> None:
        """Set the limit, and begin to count anew."""
        if memory_bytes != self._limit:
            _write(self._memory, self._version.memory_limit, str(memory_bytes))
            self._limit = memory_bytes
        self.max_memory = 0
        self._before = self._counts()

    def forgive(self) -> None:
        """Begin to count processes killed for memory anew; CPU time is counted on."""
        self._before = (self._kills(), self._refusals(), self._before[2])

    def procs_files(self) -> list[int]:
        """Descriptors through which a process joins the group by writing ``0``. They are the group's own."""
        return [self._files.descriptor(f"{folder}/{self._version.procs_file}", os.O_WRONLY) for folder in self._folders]

    def cpu_seconds(self) -> float:
        """CPU time of all its processes, dead ones too, since `prepare`."""
        return (self._cpu_used() - self._before[2]) / self._version.cpu_units

    def look(self) -> None:
        """Note how much memory is in use."""
        self.max_memory = max(self.max_memory, self.memory_now())

    def memory_now(self) -> int:
        return self._files.number(self._memory, self._version.memory_used, "")

    def lost_process(self) -> bool:
        """Whether the kernel has killed one of its processes for memory."""
        return self._kills() > self._before[0]

    def exceeded_memory(self) -> bool:
        """Whether the group's own limit was reached: then what the kernel killed in it died for its own use."""
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
        """Give its descriptors back; what needs a file opens it again."""
        self._files.close()

    def remove(self, deadline: float) -> None:
        """Remove its folders once its last process is gone; `deadline` as of `time.monotonic`."""
        self.close_files()
        for folder in self._folders:
            _remove(folder, deadline)


class ControlGroup:
    """The groups of one pool."""

    def __init__(self, version: Version, memory: str, cpu: str, accounting: str) -> None:
        """Folders below which groups may be made, by controller."""
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
        """Make the groups of a pool with this ceiling; None if this process may not."""
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
        self.give(self.take(memory_bytes))  # a run's group can be made, too
        # As much as a busy process on each core; the server and the forkservers are to get their turn beside runs that
        # spin. Among themselves runs have equal shares, whatever they start.
        weight = min(self._version.weight_unit * len(os.sched_getaffinity(0)), _MAX_WEIGHT)
        _write(self._cpu, self._version.weight, str(weight))

    def joining(self, command: list[str]) -> list[str]:
        """`command`, started as a forkserver within the group."""
        procs = f"{self._memory}/{_FORKSERVERS}/cgroup.procs"
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', procs, *command]

    def memory_now(self) -> int:
        """Bytes of all its groups together, those of forkservers included. Raises OSError."""
        return self._files.number(self._memory, self._version.memory_used, "")

    def take(self, memory_bytes: int) -> RunGroup:
        """A group for a run with this limit. Raises OSError if the kernel makes no more."""
        while self._free:
            group = self._free.pop()
            try:
                group.prepare(memory_bytes)
                return group
            except OSError:  # somebody has removed it
                group.close_files()
        number = len(self._made)
        group = RunGroup(
            self._version, f"{self._memory}/{number}", f"{self._cpu}{number}", f"{self._accounting}{number}"
        )
        self._made.append(group)
        group.prepare(memory_bytes)
        return group

    def give(self, group: RunGroup, *, gone: bool = True) -> None:
        """Give back the group of a run. Not `gone`: something of the run may be left, so no other gets its group."""
        if gone:
            self._free.append(group)
            # The last one is the first to be taken again; the files of those that wait longer need not stay open.
            if len(self._free) > _FREE_OPEN:
                self._free[-_FREE_OPEN - 1].close_files()
        else:
            group.close_files()

    def remove(self) -> None:
        """Remove all of it once the last process is gone."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        self._files.close()
        for group in self._made:
            group.remove(deadline)
        for folder in (f"{self._memory}/{_FORKSERVERS}", *self._folders):
            _remove(folder, deadline)


def group_bytes(resident_bytes: int, limits: Limits) -> int:
    """What a run's group may hold: its memory, its files, and its own copy of all that the warm interpreter has
    (`resident_bytes`).

    Rounded up, so that groups need no other limit for the next worker of the same kind.
    """
    total = limits.memory_bytes + limits.disk_bytes + resident_bytes + _OVERHEAD_BYTES
    return -(-total // _GROUP_STEP) * _GROUP_STEP


def _candidates() -> Iterator[tuple[Version, Sequence[str]]]:
    """Where groups might be made: folders for memory, CPU and the counting of CPU time."""
    if os.path.exists(f"{_ROOT}/cgroup.controllers"):
        own = _ROOT + _own_path().rstrip("/")
        # Processes and groups do not mix below the root, so a service is delegated the folder above its own.
        for folder in dict.fromkeys((own, os.path.dirname(own), _ROOT)):
            if folder.startswith(_ROOT) and _delegates(folder):
                yield _V2, (folder, folder, folder)
    yield _V1, tuple(f"{_ROOT}/{controller}" for controller in ("memory", "cpu", "cpuacct"))


def _own_path() -> str:
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        return next((line.strip().partition("::")[2] for line in file if line.startswith("0::")), "")
    return ""


def _delegates(folder: str) -> bool:
    """Whether groups below a folder have the controllers, or may be given them."""
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
        except OSError:  # busy until the kernel has buried the last process
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)


def _remove_orphans(place: str) -> None:
    """Remove the groups of servers that were killed before they could."""
    found = [match for name in os.listdir(place) if (match := _NAME.fullmatch(name))]
    live = {_started(int(name)) for name in os.listdir("/proc") if found and name.isdigit()}
    for group in found:
        if group["mark"] not in {_mark(process, group["salt"]) for process in live}:
            for folder, _, _ in os.walk(os.path.join(place, group[0]), topdown=False):
                with contextlib.suppress(OSError):  # not empty yet, or another server was faster
                    os.rmdir(folder)


def _started(pid: int) -> str:
    """What tells a process from all others since the machine's start: its pid and its own start. Empty: it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return f"{pid} {file.read().rpartition(')')[2].split()[19]}"
    return ""


def _mark(process: str, salt: str) -> str:
    return hashlib.sha256(f"{process} {salt}".encode()).hexdigest()[:16]
