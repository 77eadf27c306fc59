"""Limits of runs and sessions."""

from __future__ import annotations

from dataclasses import dataclass, fields

from verl_tool.errors import ConfigError

CONTAINER_OPEN_FILES = 4096
"""In place of `Limits.open_files`, for containers, whose images have programs of any kind."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run, for all its processes together unless a field says otherwise."""

    wall_seconds: float = 10.0
    """Seconds from the fork to the kill. Time in the pool's queue does not count."""
    cpu_seconds: float | None = None
    """Seconds of CPU time. With None, only the wall time is limited."""
    memory_bytes: int = 2 << 30
    """Bytes in addition to the warm interpreter. A process that needs more gets a `MemoryError`; several processes that
    exceed it together are killed."""
    processes: int = 32
    """Processes and threads that exist at the same time, including the first one."""
    open_files: int = 256
    output_bytes: int = 1 << 20
    """Bytes stored of stdout, and as many of stderr. Further bytes are counted and dropped."""
    disk_bytes: int = 64 << 20
    """Bytes in the run's folder, /tmp and /dev/shm together, and the maximum size of one file."""
    disk_files: int = 4096
    """Files and folders in the same places."""

    def __post_init__(self) -> None:
        """Raise ConfigError if a limit is below its minimum."""
        for field in fields(self):
            value, minimum = getattr(self, field.name), _MINIMA[field.name]
            if value is not None and not value >= minimum:
                raise ConfigError(f"limit {field.name}={value!r} is too small; give {minimum} or more")


@dataclass(frozen=True)
class SessionLimits(Limits):
    """Limits of a session: `wall_seconds` applies to each call, all others to the whole session."""

    total_wall_seconds: float = 3600.0
    """Total duration of all calls in seconds."""
    idle_seconds: float = 1800.0
    """Seconds without a call after which the session is ended."""


_MINIMA = {
    "wall_seconds": 0.01,
    "cpu_seconds": 0.01,
    "memory_bytes": 16 << 20,
    "processes": 1,
    "open_files": 16,
    "output_bytes": 1,
    "disk_bytes": 1 << 16,
    "disk_files": 16,
    "total_wall_seconds": 0.01,
    "idle_seconds": 0.01,
}
