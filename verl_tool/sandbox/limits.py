"""What one run may use."""

from __future__ import annotations

from dataclasses import dataclass, fields

from verl_tool.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Bounds of one run: of all its processes together, unless a field says otherwise."""

    wall_seconds: float = 10.0
    """Seconds from the fork to the kill. Time in the pool's queue does not count."""
    cpu_seconds: float | None = None
    """Seconds of CPU time; None leaves the wall limit to bound it."""
    memory_bytes: int = 2 << 30
    """Bytes on top of the warmed interpreter. One process is refused more (`MemoryError`); several that exceed it
    together are killed."""
    processes: int = 32
    """Processes and threads alive at once, the run's own first one included."""
    open_files: int = 256
    output_bytes: int = 1 << 20
    """Bytes kept of stdout, and as many of stderr; what is written beyond is counted and dropped."""
    disk_bytes: int = 64 << 20
    """Bytes in the run's folder, /tmp and /dev/shm together; also the size of any one file."""
    disk_files: int = 4096
    """Files and folders in the same places."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a limit is below its least sensible value."""
        for field in fields(self):
            value, minimum = getattr(self, field.name), _MINIMA[field.name]
            if value is not None and not value >= minimum:
                raise ConfigError(f"limit {field.name}={value!r} is too small; give {minimum} or more")


@dataclass(frozen=True)
class SessionLimits(Limits):
    """Bounds of a session: `wall_seconds` of each call, all others of the whole session."""

    total_wall_seconds: float = 3600.0
    """Seconds that all its calls may take together."""
    idle_seconds: float = 1800.0
    """Seconds without a call after which it is ended."""


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
