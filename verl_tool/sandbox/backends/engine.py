"""Run the ``docker`` or ``podman`` command line: one process per command, with a deadline and limited output."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from verl_tool.errors import ConfigError, SandboxError

_PASSED = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
_PASSED_PREFIXES = ("DOCKER_", "CONTAINER_", "CONTAINERS_", "PODMAN_")
NETWORK_PREFIXES = (
    *_PASSED_PREFIXES,
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("SSL_CERT_", "REGISTRY_AUTH_FILE"),
)
"""Of a command line that fetches images. One that runs containers would pass proxies on to them."""
_READ_BYTES = 1 << 16
_END_SECONDS = 5.0
"""Time for a killed process to exit."""


ENGINES = ("podman", "docker")
_ANSWER_SECONDS = 20.0


@lru_cache(maxsize=1)
def find_engine() -> str:
    """Return the first of `ENGINES` that answers on this machine, and ``sandbox`` if none does: docker's client may be
    there without an engine."""
    for name in ENGINES:
        try:
            answer = subprocess.run([name, "info"], capture_output=True, timeout=_ANSWER_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0:
            return name
    return "sandbox"


@dataclass(frozen=True)
class Ran:
    """Result of one call of the command line."""

    code: int | None
    """Exit code, None after the deadline."""
    stdout: bytes
    """Content up to the limit."""
    stderr: bytes
    stdout_bytes: int
    """Number of bytes written, including dropped ones."""
    stderr_bytes: int


class ContainerEngine:
    """The command line of a container engine."""

    def __init__(self, command: str, prefixes: tuple[str, ...] = _PASSED_PREFIXES) -> None:
        """Find `command`. prefixes: of environment variables that it sees in addition. Raises
        ConfigError if there is no such program on PATH."""
        path = shutil.which(command)
        if path is None:
            raise ConfigError(f"there is no program {command!r} on PATH; install it, or set backend to 'sandbox'")
        self.command, self._path, self._prefixes = command, path, prefixes

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        """Start a call on pipes, without waiting for its end.

        It does not receive Ctrl-C, and sees only those environment variables that the command line needs. Raises
        OSError EINVAL or E2BIG for arguments that cannot be passed to a program, and SandboxError if the command line
        cannot be run.
        """
        words = [word.encode("utf-8", "surrogatepass") for word in arguments]
        if any(b"\0" in word for word in words):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        try:
            return await asyncio.create_subprocess_exec(
                self._path,
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment(),
                cwd=tempfile.gettempdir(),  # podman's conmon leaves a file `oom` where it runs
                start_new_session=True,
            )
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise
            raise SandboxError(f"{self.command} cannot be run: {error}", retryable=True) from error

    async def run(
        self, arguments: Sequence[str], *, seconds: float, stdin: bytes = b"", max_bytes: int = 1 << 20
    ) -> Ran:
        """Run a call until it ends, or for `seconds`. Stores up to `max_bytes` of each stream. Raises like `start`."""
        process = await self.start(*arguments)
        out, err = _Captured(max_bytes), _Captured(max_bytes)
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

    def _environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name in _PASSED or name.startswith(self._prefixes)}


class _Captured:
    """The beginning of a stream, and its length."""

    def __init__(self, max_bytes: int) -> None:
        self.data, self.total = bytearray(), 0
        self._max_bytes = max_bytes

    async def take(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(_READ_BYTES):
            self.total += len(data)
            self.data += data[: self._max_bytes - len(self.data)]


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError, RuntimeError):  # the latter is uvloop's, of a transport that is closed
        if data:
            stream.write(data)
            await stream.drain()
    stream.close()


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a process of the command line if it has not ended. This does not end its processes in a container."""
    deadline = asyncio.get_running_loop().time() + _END_SECONDS
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    # `Process.wait` also waits for its pipes, which other processes may keep open.
    while process.returncode is None and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    process._transport.close()  # type: ignore[attr-defined]
