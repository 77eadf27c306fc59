"""Input and output files of one run: the job, and what the run wrote.

They are anonymous files in memory that are passed by descriptor, so that the pool need not read while the code runs.
They are read after the last process of the run has ended, and their content is not trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from verl_tool.errors import ConfigError
from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.limits import Limits
from verl_tool.sandbox.result import RunResult, written

_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 2048
"""Maximum length of a file's name and of its path (limits.h)."""


@dataclass(frozen=True)
class Output:
    """Output of a run, as stored in its files."""

    stdout: bytes
    """Content up to the limit."""
    stderr: bytes
    """Content up to the limit."""
    interleaved: bytes
    """Both streams, in the order of writing."""
    stdout_bytes: int
    """Number of bytes written, including dropped ones."""
    stderr_bytes: int
    """Number of bytes written, including dropped ones."""


class JobFiles:
    """The files of a run. `close` them afterwards; a run in progress has descriptors of its own."""

    def __init__(self, code: bytes, stdin: bytes, files: Mapping[str, bytes]) -> None:
        """Write the job. Raises OSError if memory or descriptors run out."""
        self.fds: list[int] = []
        """Descriptors of the job, stdout, stderr, and stdin if it is not empty."""
        try:
            for name in ("job", "stdout", "stderr"):
                self.fds.append(os.memfd_create(name, os.MFD_CLOEXEC))
            for fd in self.fds[1:]:
                # Without O_APPEND, all processes of a run share one position, which the kernel does not lock here.
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
            _write_job(self.fds[0], code, files)
            if stdin:
                self.fds.append(os.memfd_create("stdin", os.MFD_CLOEXEC))
                _write_all(self.fds[3], stdin, 0)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def state(self) -> int:
        """Return the progress as reported by the run: `wire.NOT_STARTED`, `STARTED` or `SETUP_FAILED`."""
        return int(struct.unpack("<Q", os.pread(self.fds[0], 8, 0))[0])

    def failure(self) -> str:
        """Return the reason why the user's code was not reached."""
        text = os.pread(self.fds[0], wire.FAILURE_BYTES, wire.FIRST_SWITCH * 8).split(b"\0")[0]
        return text.decode(errors="replace") or "its process ended before the user's code was reached"

    def output(self, limit: int) -> Output:
        """Read the output, up to `limit` bytes of each stream."""
        streams, total = [], []
        dropped = struct.unpack("<QQ", os.pread(self.fds[0], 16, wire.DROPPED_OUT * 8))
        for fd, beyond in zip(self.fds[1:3], dropped, strict=True):
            size = os.fstat(fd).st_size
            streams.append(os.pread(fd, min(size, limit), 0) if size else b"")
            total.append(size + beyond)
        return Output(streams[0], streams[1], self._interleave(streams[0], streams[1]), total[0], total[1])

    def result(
        self,
        limits: Limits,
        *,
        exit_code: int | None,
        killed_by: int | None,
        limit_hit: str | None,
        wall_seconds: float = 0.0,
        cpu_seconds: float = 0.0,
        peak_memory_bytes: int = 0,
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> RunResult:
        """Combine the output of the run with the way it ended."""
        output = self.output(limits.output_bytes)
        return RunResult(
            **written(output.stdout, output.stderr, output.stdout_bytes, output.stderr_bytes, output.interleaved),
            exit_code=exit_code,
            signal=killed_by,
            limit_hit=limit_hit,
            wall_seconds=wall_seconds,
            cpu_seconds=cpu_seconds,
            peak_memory_bytes=peak_memory_bytes,
            files=dict(files),
        )

    def _interleave(self, stdout: bytes, stderr: bytes) -> bytes:
        if not stderr or not stdout:
            return stdout or stderr
        count = min(struct.unpack("<Q", os.pread(self.fds[0], 8, wire.COUNT * 8))[0], wire.SWITCHES)
        words = struct.unpack(f"<{count}Q", os.pread(self.fds[0], 8 * count, wire.FIRST_SWITCH * 8))
        return interleave(stdout, stderr, words)


def encode(text: str | bytes) -> bytes:
    """Encode a text for a program, including unpaired surrogates."""
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)


def interleave(stdout: bytes, stderr: bytes, switches: Sequence[int]) -> bytes:
    """Interleave the stored bytes of two streams. Every byte occurs once, and each stream keeps its order.

    `switches` is the run's journal. At each change of stream, it contains ``position << 1 | stream`` of the stream that
    was left (0 for stdout, 1 for stderr). The run may have written any values.
    """
    streams = (stdout, stderr)
    done = [0, 0]
    parts = []
    current = 0
    for word in switches:
        left, position = word & 1, word >> 1
        if position > done[left]:
            parts.append(streams[left][done[left] : position])
            done[left] = min(position, len(streams[left]))
        current = 1 - left
    for stream in (current, 1 - current):
        parts.append(streams[stream][done[stream] :])
    return b"".join(parts)


def _write_job(fd: int, code: bytes, files: Mapping[str, bytes]) -> None:
    parts = [wire.JOB.pack(len(code), len(files)), code]
    for name, content in files.items():
        raw = name.encode()
        parts += [wire.FILE.pack(len(raw), len(content)), raw, content]
    _write_all(fd, b"".join(parts), wire.JOURNAL_BYTES)


def _write_all(fd: int, content: bytes, position: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written


def check_names(files: Iterable[str], fetch_files: Iterable[str]) -> None:
    """Check the names of the files to write to the run's folder, and to fetch from it.

    Raises ConfigError if a name would leave the folder, is too long, or names both a file and a folder.
    """
    names = {wire.SCRIPT_NAME}
    for name in files:
        _check_name(name)
        names.add(name)
    for name in fetch_files:
        _check_name(name)
    for name in names:
        at = name.find("/")
        while at >= 0:
            if name[:at] in names:
                raise ConfigError(f"file {name!r} needs a folder where the file {name[:at]!r} is to be; rename one")
            at = name.find("/", at + 1)


def _check_name(name: str) -> None:
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(f"file name {name!r} must be a plain path within the run's folder, as 'data/in.csv'")
    try:
        longest = max(len(part.encode()) for part in parts)
    except UnicodeEncodeError as error:
        raise ConfigError(f"file name {name!r} cannot be written in UTF-8") from error
    if longest > _MAX_NAME_BYTES or len(name.encode()) > _MAX_PATH_BYTES:
        limits = f"{_MAX_NAME_BYTES} bytes a part, {_MAX_PATH_BYTES} in all"
        raise ConfigError(f"file name {name[:100]!r}... is too long; allowed are {limits}")


def fetch(folder_fd: int, names: Sequence[str], limit: int) -> dict[str, bytes]:
    """Read files from a run's folder after the run has ended, without following links.

    Names that do not exist or are not regular files are left out, and so are files that exceed what is left of `limit`,
    the maximum number of bytes in total.
    """
    found: dict[str, bytes] = {}
    for name in names:
        with contextlib.suppress(OSError):
            content = _read_beneath(folder_fd, name.split("/"), limit)
            if content is not None:
                found[name] = content
                limit -= len(content)
    return found


def _read_beneath(folder_fd: int, parts: Sequence[str], limit: int) -> bytes | None:
    opened: list[int] = []
    try:
        at = folder_fd
        for part in parts[:-1]:
            at = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            opened.append(at)
        # O_NONBLOCK: opening a fifo must not block.
        at = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        opened.append(at)
        status = os.fstat(at)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            return None
        return os.pread(at, status.st_size, 0)
    finally:
        for fd in opened:
            os.close(fd)
