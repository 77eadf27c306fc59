"""One run's files as the pool sees them: the job that goes in, the output that comes back.

They are anonymous files in memory, passed by descriptor, so nothing has to be drained while the code runs. What a run
wrote is read only after its last process is gone, and never trusted.
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

_LONGEST_NAME, _LONGEST_PATH = 255, 2048
"""Bytes of a file's name and of its path (limits.h)."""


@dataclass(frozen=True)
class Output:
    """What a run left in its files."""

    stdout: bytes
    """Up to the limit."""
    stderr: bytes
    """Up to the limit."""
    interleaved: bytes
    """Both, in the order of writing."""
    stdout_bytes: int
    stderr_bytes: int


class JobFiles:
    """The files of a run. `close` them; a run that is still alive keeps its own descriptors."""

    def __init__(self, code: bytes, stdin: bytes, files: Mapping[str, bytes]) -> None:
        """Write the job. Raises OSError if memory or descriptors run out."""
        self.fds: list[int] = []
        """Job, stdout, stderr, and stdin if there is any."""
        try:
            for name in ("job", "stdout", "stderr"):
                self.fds.append(os.memfd_create(name, os.MFD_CLOEXEC))
            for fd in self.fds[1:]:
                # Else the kernel keeps one position for all processes of a run, and does not lock it in such a file.
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
        """How far the run got, as it says itself: `wire.NOT_STARTED`, `STARTED` or `SETUP_FAILED`."""
        return int(struct.unpack("<Q", os.pread(self.fds[0], 8, 0))[0])

    def failure(self) -> str:
        """Why the user's code was not reached."""
        text = os.pread(self.fds[0], wire.FAILURE_BYTES, wire.FIRST_SWITCH * 8).split(b"\0")[0]
        return text.decode(errors="replace") or "its process ended before the user's code was reached"

    def output(self, limit: int) -> Output:
        """What was written, `limit` bytes of each stream."""
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
        """What a run wrote, and how it ended."""
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
    """A text as a program reads it, half surrogate pairs included."""
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)


def interleave(stdout: bytes, stderr: bytes, switches: Sequence[int]) -> bytes:
    """Put what was kept of two streams together: every byte once, each stream in its own order. `switches` is the
    journal that the run kept, whose words may be anything: at each change of stream, ``position << 1 | stream`` (0
    stdout, 1 stderr) of the one left."""
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
    """See that names can be those of files in the run's folder: to put there, and to bring back. Raises ConfigError if
    one would leave the folder, is too long, or is a file and a folder at once."""
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
    if longest > _LONGEST_NAME or len(name.encode()) > _LONGEST_PATH:
        raise ConfigError(
            f"file name {name[:100]!r}... is too long; allowed are {_LONGEST_NAME} bytes a part, {_LONGEST_PATH} in all"
        )


def fetch(folder_fd: int, names: Sequence[str], limit: int) -> dict[str, bytes]:
    """Read files out of a run's folder after the run has ended, following no link. Names that are absent, links or no
    plain files are left out, as are the first file that would exceed `limit`, bytes of all together, and those after
    it."""
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
        # O_NONBLOCK: a fifo must not hold us.
        at = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        opened.append(at)
        status = os.fstat(at)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            return None
        return os.pread(at, status.st_size, 0)
    finally:
        for fd in opened:
            os.close(fd)
