"""The ``docker`` or ``podman`` command line: one process a command, with a deadline and bounded output."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from verl_tool.errors import ConfigError, SandboxError

_PASSED = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
_PASSED_PREFIXES = ("DOCKER_", "CONTAINER_", "CONTAINERS_", "PODMAN_")
_READ_BYTES = 1 << 16
_END_SECONDS = 5.0
"""For a killed process to be gone."""


@dataclass(frozen=True)
class Ran:
    """What one command of the command line gave."""

    code: int | None
    """None if its time was up."""
    stdout: bytes
    """Up to the limit."""
    stderr: bytes
    stdout_bytes: int
    """In all."""
    stderr_bytes: int


class ContainerEngine:
    def __init__(self, command: str) -> None:
        """Raises ConfigError if there is no such program on PATH."""
        path = shutil.which(command)
        if path is None:
            raise ConfigError(f"there is no program {command!r} on PATH; install it, or set backend to 'sandbox'")
        self.command, self._path = command, path

    async def start(
        self,
        *arguments: str,
        streams: tuple[int, int, int] | None = None,
        stderr: int = asyncio.subprocess.PIPE,
        line_bytes: int = _READ_BYTES,
    ) -> asyncio.subprocess.Process:
        """Start one that goes on running, on pipes or on the descriptors given. `line_bytes`: the longest line that is
        read from it. A Ctrl-C in our terminal does not reach
        it, and of our environment it has what the command line itself needs. Raises OSError with the number EINVAL or
        E2BIG for arguments that no program can be given, and SandboxError if the command line cannot be run."""
        stdin, stdout, err = streams or (asyncio.subprocess.PIPE, asyncio.subprocess.PIPE, stderr)
        words = [word.encode("utf-8", "surrogatepass") for word in arguments]
        if any(b"\0" in word for word in words):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        try:
            return await asyncio.create_subprocess_exec(
                self._path,
                *words,
                stdin=stdin,
                stdout=stdout,
                stderr=err,
                env=_environment(),
                start_new_session=True,
                limit=line_bytes,
            )
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise
            raise SandboxError(f"{self.command} cannot be run: {error}", retryable=True) from error

    async def run(self, arguments: Sequence[str], *, seconds: float, stdin: bytes = b"", most: int = 1 << 20) -> Ran:
        """Run one to its end, or until `seconds` are over; `most` bytes of each stream are kept. Raises as `start`."""
        process = await self.start(*arguments)
        out, err = _Captured(most), _Captured(most)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        work = asyncio.gather(
            _feed(process.stdin, stdin), out.take(process.stdout), err.take(process.stderr), process.wait()
        )
        try:
            await asyncio.wait_for(work, seconds)
            code = process.returncode
        except asyncio.TimeoutError:
            code = None
        finally:
            await end(process)
        return Ran(code, bytes(out.data), bytes(err.data), out.total, err.total)


class _Captured:
    """The beginning of a stream, and its length."""

    def __init__(self, most: int) -> None:
        self.data, self.total = bytearray(), 0
        self._most = most

    async def take(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(_READ_BYTES):
            self.total += len(data)
            self.data += data[: self._most - len(self.data)]


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
    stream.close()


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a process of the command line if it has not ended; what it runs in a container does not end by that."""
    deadline = asyncio.get_running_loop().time() + _END_SECONDS
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    # `Process.wait` would wait for whoever else holds its pipes, too.
    while process.returncode is None and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    process._transport.close()  # type: ignore[attr-defined]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith(_PASSED_PREFIXES)}
