"""What one run gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunResult:
    """Everything that a caller can know of a run that ended, by itself or by a limit."""

    stdout: str
    """What it wrote to stdout, up to the limit; bytes that are no UTF-8 are replaced by U+FFFD."""
    stderr: str
    """The same of stderr."""
    output: str
    """Both, interleaved as they were written."""
    stdout_bytes: int
    """Bytes written to stdout in all, kept or dropped."""
    stderr_bytes: int
    """Bytes written to stderr in all, kept or dropped."""
    stdout_truncated: bool
    stderr_truncated: bool
    exit_code: int | None
    """0 to 255, or None if a signal ended the run."""
    signal: int | None
    """The signal that ended the run, or None if it exited."""
    limit_hit: str | None
    """The limit that ended it: ``wall_seconds``, ``cpu_seconds`` or ``memory_bytes``; ``sandbox`` if it broke the
    process that ran it, time and again and alone; None if it ended by itself."""
    wall_seconds: float
    """From the fork to the end of the run's first process."""
    cpu_seconds: float = 0.0
    """User and system time of the run's processes, set-up included."""
    peak_memory_bytes: int = 0
    """Most resident memory of the largest process, the warmed interpreter's share included."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The files that were asked for and were there, by the name asked for."""
    stdout_raw: bytes = field(default=b"", repr=False)
    """stdout byte for byte, up to the limit."""
    stderr_raw: bytes = field(default=b"", repr=False)
    """stderr byte for byte, up to the limit."""

    @property
    def timed_out(self) -> bool:
        """Whether the limit of wall or CPU time ended it."""
        return self.limit_hit in ("wall_seconds", "cpu_seconds")

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0


def written(
    stdout: bytes, stderr: bytes, stdout_bytes: int, stderr_bytes: int, output: bytes | None = None
) -> dict[str, Any]:
    """The fields of a result that tell what was written, of what was kept and the bytes in all. `output`: both streams
    in their order; by default stdout stands before stderr."""
    texts = [stream.decode(errors="replace") for stream in (stdout, stderr)]
    return {
        "stdout": texts[0],
        "stderr": texts[1],
        "output": "".join(texts) if output is None else output.decode(errors="replace"),
        "stdout_bytes": stdout_bytes,
        "stderr_bytes": stderr_bytes,
        "stdout_truncated": stdout_bytes > len(stdout),
        "stderr_truncated": stderr_bytes > len(stderr),
        "stdout_raw": stdout,
        "stderr_raw": stderr,
    }


@dataclass(frozen=True)
class CellResult(RunResult):
    """What one cell of a session gave. Its output is that of the cell alone."""

    state: str = "kept"
    """What became of the session's Python state. ``kept``: it is as the cell left it, also after an exception.
    ``rolled_back``: the cell did not come to its end, and variables and modules are as they were before it; what it
    wrote to files, shared maps, pipes and sockets stays. ``lost``: all variables are gone, and the next cell starts
    with a fresh interpreter."""
    ended_threads: int = 0
    """Threads that the cell left running, and that were ended with it."""
    ended_processes: int = 0
    """Processes of the same kind."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a model should know of the state besides the cell's output, in sentences; often nothing."""
        state = {
            "kept": "",
            "rolled_back": "Variables and modules are as they were before this cell; "
            "what it wrote to files, shared memory, pipes and sockets remains.",
            "lost": "All variables are lost, and the next cell starts with a fresh interpreter; files remain.",
        }[self.state]
        threads = f"Threads left running by the cell were ended: {self.ended_threads}." if self.ended_threads else ""
        others = f"Processes left running by the cell were ended: {self.ended_processes}."
        return tuple(note for note in (state, threads, others if self.ended_processes else "") if note)
