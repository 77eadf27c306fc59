"""What the processes of a run use together: the kernel's limits are per process, or per user."""

from __future__ import annotations

import os

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")
_UTIME, _CSTIME, _RSS, _START_CODE, _SESSION = 11, 14, 21, 23, 3
"""Fields of /proc/PID/stat, counted from the one after the command's name (proc(5) counts from 1 and two earlier)."""


class Use:
    """A sum over the live processes of one run."""

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self.memory_bytes = 0
        """At most: memory that processes share counts for each of them."""
        self.pids: tuple[int, ...] = ()


class ResourceMonitor:
    """Reads /proc, as the forkserver sees it."""

    def __init__(self, isolated: bool) -> None:
        """`isolated`: runs are told apart by pid namespace; else by session."""
        self._isolated = isolated
        fields = _stat(os.getpid())
        assert fields is not None  # our own process is there
        self._start_code = fields[_START_CODE]
        self._base_pages = int(fields[_RSS])

    def group_of(self, pid: int) -> str | None:
        """A key that all processes of one run have in common; None if the process is gone."""
        if not self._isolated:
            fields = _stat(pid)
            return fields[_SESSION].decode() if fields else None
        try:
            return os.readlink(f"/proc/{pid}/ns/pid")
        except OSError:
            return None

    def survey(self, leave_out: set[int]) -> dict[str, Use]:
        """What each group uses now, but for the pids in `leave_out`."""
        groups: dict[str, Use] = {}
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) in leave_out:
                continue
            pid = int(name)
            group, fields = self.group_of(pid), _stat(pid)
            if group is None or fields is None:
                continue
            use = groups.setdefault(group, Use())
            use.cpu_seconds += sum(map(int, fields[_UTIME : _CSTIME + 1])) / _TICKS
            use.memory_bytes += self._own_pages(fields) * _PAGE
            use.pids += (pid,)
        return groups

    def _own_pages(self, fields: list[bytes]) -> int:
        """Resident pages. A fork of ours starts with our pages; a program that it started does not."""
        inherited = self._base_pages if fields[_START_CODE] == self._start_code else 0
        return max(0, int(fields[_RSS]) - inherited)

    @staticmethod
    def proportional_bytes(pids: tuple[int, ...]) -> int:
        """Exact memory of some processes, shared pages counted once among those who share them. Slow: walks pages."""
        return sum(_proportional(pid) for pid in pids)


def _stat(pid: int) -> list[bytes] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            return file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return None


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb", buffering=0) as file:
            for line in file.read(4096).splitlines():
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        return 0
    return 0
