"""Results of runs and of cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunResult:
    """The output and the end of a finished run."""

    stdout: str
    """Text written to stdout, up to the limit. Bytes that are not UTF-8 are replaced by U+FFFD."""
    stderr: str
    """The same for stderr."""
    output: str
    """Both streams, in the order of writing."""
    stdout_bytes: int
    """Number of bytes written to stdout, including dropped ones."""
    stderr_bytes: int
    """Number of bytes written to stderr, including dropped ones."""
    stdout_truncated: bool
    stderr_truncated: bool
    exit_code: int | None
    """0 to 255, or None if a signal ended the run."""
    signal: int | None
    """The signal that ended the run, or None if it exited."""
    limit_hit: str | None
    """The limit that ended the run: ``wall_seconds``, ``cpu_seconds`` or ``memory_bytes``; ``sandbox`` if it crashed
    its forkserver repeatedly, also one that it had for itself; None if it ended by itself."""
    wall_seconds: float
    """Seconds from the fork to the end of the run's first process."""
    cpu_seconds: float = 0.0
    """User and system time of the run's processes, including the set-up."""
    peak_memory_bytes: int = 0
    """Maximum resident memory of the largest process, including the warm interpreter."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The requested files that existed, by the requested name."""
    stdout_raw: bytes = field(default=b"", repr=False)
    """Bytes written to stdout, up to the limit."""
    stderr_raw: bytes = field(default=b"", repr=False)
    """Bytes written to stderr, up to the limit."""

    @property
    def timed_out(self) -> bool:
        """Whether the limit of wall or CPU time ended the run."""
        return self.limit_hit in ("wall_seconds", "cpu_seconds")

    @property
    def ok(self) -> bool:
        """Whether the run ended by itself with exit code 0."""
        return self.exit_code == 0


def written(
    stdout: bytes, stderr: bytes, stdout_bytes: int, stderr_bytes: int, output: bytes | None = None
) -> dict[str, Any]:
    """Return the fields of a result about its output, from the stored bytes and the numbers of bytes written.

    `output` is both streams in the order of writing, by default stdout followed by stderr.
    """
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
    """The result of one cell of a session. Its output is that of this cell only."""

    state: str = "kept"
    """The session's Python state after the cell.

    - ``kept``: as the cell left it, also after an exception.
    - ``rolled_back``: the cell was stopped, and variables and modules are as before it. What it wrote to files, shared
      memory, pipes and sockets remains.
    - ``lost``: all variables are lost, and the next cell starts with a fresh interpreter.
    """
    ended_threads: int = 0
    """Number of threads that the cell left running and that were ended."""
    ended_processes: int = 0
    """Number of processes that the cell left running and that were ended."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the state for the model, in addition to the output. Usually none."""
        state = {
            "kept": "",
            "rolled_back": "Variables and modules are as they were before this cell; "
            "what it wrote to files, shared memory, pipes and sockets remains.",
            "lost": "All variables are lost, and the next cell starts with a fresh interpreter; files remain.",
        }[self.state]
        threads = f"Threads left running by the cell were ended: {self.ended_threads}." if self.ended_threads else ""
        others = f"Processes left running by the cell were ended: {self.ended_processes}."
        return tuple(note for note in (state, threads, others if self.ended_processes else "") if note)
