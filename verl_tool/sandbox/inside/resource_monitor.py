"""Measure what all processes of a run use together, since the kernel's limits are per process or per user."""

from __future__ import annotations

import os

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")
_UTIME, _CSTIME, _RSS, _START_CODE, _SESSION = 11, 14, 21, 23, 3
"""Indices of fields in /proc/PID/stat after the command's name, which are 3 less than the numbers in proc(5)."""


class Use:
    """Resource use, summed over the live processes of one run."""

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self.memory_bytes = 0
        """An upper bound: shared memory counts for each process."""
        self.pids: tuple[int, ...] = ()


class ResourceMonitor:
    """Reads the /proc of the forkserver."""

    def __init__(self, isolated: bool) -> None:
        """If `isolated`, runs are distinguished by pid namespace, otherwise by session."""
        self._isolated = isolated
        fields = _read_stat(os.getpid())
        assert fields is not None  # this process exists
        self._start_code = fields[_START_CODE]
        self._base_pages = int(fields[_RSS])

    def find_group(self, pid: int) -> str | None:
        """Return a key that all processes of one run have in common. None if the process has exited."""
        if not self._isolated:
            fields = _read_stat(pid)
            return fields[_SESSION].decode() if fields else None
        try:
            return os.readlink(f"/proc/{pid}/ns/pid")
        except OSError:
            return None

    def measure(self, excluded_pids: set[int]) -> dict[str, Use]:
        """Return the current use of each group, without `excluded_pids`."""
        groups: dict[str, Use] = {}
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) in excluded_pids:
                continue
            pid = int(name)
            group, fields = self.find_group(pid), _read_stat(pid)
            if group is None or fields is None:
                continue
            use = groups.setdefault(group, Use())
            use.cpu_seconds += sum(map(int, fields[_UTIME : _CSTIME + 1])) / _TICKS
            use.memory_bytes += self._count_private_pages(fields) * _PAGE
            use.pids += (pid,)
        return groups

    def _count_private_pages(self, fields: list[bytes]) -> int:
        """Count resident pages, without those that a fork inherits. A program that it executes inherits none."""
        inherited = self._base_pages if fields[_START_CODE] == self._start_code else 0
        return max(0, int(fields[_RSS]) - inherited)

    @staticmethod
    def proportional_bytes(pids: tuple[int, ...]) -> int:
        """Return the exact memory of processes, with shared pages counted once. Slow, because it walks all pages."""
        return sum(_read_pss(pid) for pid in pids)


def _read_stat(pid: int) -> list[bytes] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return None


def _read_pss(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb", buffering=0) as file:
            for line in file.read(4096).splitlines():
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        return 0
    return 0
