"""Our side of the host: starts its fork server in a foreign interpreter, and talks to the process of each episode.

An episode's process is reached by a socket pair of its own, so nothing listens anywhere. It ends when its socket is
closed, and all of them end when the fork server does or when this process does, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tool.environments.host.fork_server import MAX_MESSAGE_BYTES
from verl_tool.errors import VerlToolError

MAX_ANSWER_BYTES = 8 << 20
"""JSON of the longest observation that an episode's process sends, with room for escapes."""
_INIT = str(Path(__file__).with_name("__init__.py"))
_START = (
    "import sys, importlib.util as u; s = u.spec_from_file_location('verl_tool_host', sys.argv[1]); "
    "m = u.module_from_spec(s); sys.modules['verl_tool_host'] = m; s.loader.exec_module(m); "
    "from verl_tool_host.fork_server import main; main(int(sys.argv[2]))"
)
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")
"""Variables of our environment that the host gets; others may be secret."""
_FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""The order of a set of strings must not differ between two starts, and no thread may be there at a fork."""
_CLOSE_SECONDS = 5.0
_STATUS_SECONDS = 2.0
_RETRY_SECONDS = 0.01
_FORCED = {signal.SIGKILL, signal.SIGTERM}


class HostError(VerlToolError):
    """The fork server cannot be started or has exited; the message says why."""


class EpisodeExitedError(VerlToolError):
    """The process of an episode has exited."""

    def __init__(self, status: int | None) -> None:
        self.status = status
        """As of `os.waitpid`; None if the fork server has exited too."""
        super().__init__(f"the environment's process {_describe_status(status)}")

    @property
    def by_itself(self) -> bool:
        """Whether the environment ended the process, by an exit or a crash. Nobody killed it."""
        if self.status is None:
            return False
        return not (os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) in _FORCED)


def _describe_status(status: int | None) -> str:
    if status is None:
        return "was lost with its host"
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)}"


@dataclass(frozen=True)
class HostSettings:
    """What a fork server is started with."""

    python: str
    """Path of the interpreter."""
    environments: Sequence[str]
    opponent: str | None = None
    memory_mb: int = 1024
    """Address space that an episode may take beyond that of the fork server, megabytes of 2**20 bytes."""
    start_seconds: float = 120.0
    """Time to import the environments' packages."""


class HostEpisode:
    """One episode's process. Call `ask` from one task at a time, and `HostClient.end` at the end."""

    def __init__(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        status: asyncio.Future[int | None],
    ) -> None:
        self.number = number
        self._reader, self._writer, self._status = reader, writer, status
        self._waiting = False
        """Whether an answer is outstanding. It is still when a request was cancelled."""

    async def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer. Raises EpisodeExitedError, also after a request that was cancelled, and TimeoutError after
        `seconds`."""
        if self._waiting:  # the next answer would be that of the cancelled request
            raise EpisodeExitedError(None)
        self._waiting = True
        try:
            answer = await asyncio.wait_for(self._exchange(request), seconds)
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"the environment did not answer within {seconds:g} s") from error
        except (OSError, ValueError, RuntimeError) as error:  # the last is uvloop's, of a transport that is closed
            raise EpisodeExitedError(await self._exit_status()) from error
        self._waiting = False
        return answer

    async def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._writer.write(json.dumps(request).encode() + b"\n")
        await self._writer.drain()
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise ValueError("the connection was closed")
        return dict(json.loads(line))

    async def _exit_status(self) -> int | None:
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self._status), _STATUS_SECONDS)
        return None

    def disconnect(self) -> None:
        self._writer.close()


class HostClient:
    """A fork server and its episodes. Call `start` and `close` from the event loop that uses it."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._numbers = itertools.count(1)
        self._statuses: dict[int, asyncio.Future[int | None]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self.alive = False

    @property
    def pid(self) -> int | None:
        """Process id of the fork server."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the fork server and wait until it has imported the environments' packages. Raises HostError."""
        settings = self._settings
        local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        local.setblocking(False)
        self._channel = local
        with tempfile.TemporaryFile() as errors:
            with remote:
                self._process = self._spawn(remote.fileno(), errors.fileno())
            try:
                answer = await asyncio.wait_for(self._configure(), settings.start_seconds)
            except asyncio.TimeoutError:
                answer = {"error": f"not ready within {settings.start_seconds:g} s (start_seconds)"}
            except OSError:  # it has exited
                answer = {"error": ""}
            if "error" in answer:
                await self.close()
                errors.seek(max(0, errors.seek(0, os.SEEK_END) - 2000))
                detail = errors.read().decode(errors="replace").strip() if not answer["error"] else ""
                message = answer["error"] or detail or "it ended without a message"
                raise HostError(f"{', '.join(settings.environments)} in {settings.python}: {message}")
        self.alive = True
        self._reading = asyncio.create_task(self._read_reports())

    def _spawn(self, channel_fd: int, errors_fd: int) -> subprocess.Popen[bytes]:
        command = [self._settings.python, "-I", "-c", _START, _INIT, str(channel_fd)]
        variables = {name: os.environ[name] for name in _PASSED if name in os.environ}
        try:
            return subprocess.Popen(
                command,
                pass_fds=(channel_fd,),
                env={**variables, **_FIXED},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors_fd,
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(f"python={self._settings.python} cannot be started: {error}") from error

    async def _configure(self) -> dict[str, Any]:
        assert self._channel is not None
        loop = asyncio.get_running_loop()
        config = {
            "environments": list(self._settings.environments),
            "opponent": self._settings.opponent,
            "memory_bytes": self._settings.memory_mb << 20,
        }
        await loop.sock_sendall(self._channel, json.dumps(config).encode())
        answer = await loop.sock_recv(self._channel, MAX_MESSAGE_BYTES)
        return dict(json.loads(answer)) if answer else {"error": ""}

    async def _read_reports(self) -> None:
        """Note the processes that exit, until the fork server does."""
        assert self._channel is not None
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(self._channel, MAX_MESSAGE_BYTES):
                report = json.loads(data)
                if (status := self._statuses.pop(report["exited"], None)) is not None:
                    status.set_result(report["status"])
        self.alive = False
        for status in self._statuses.values():
            status.set_result(None)
        self._statuses.clear()

    async def open(self, seconds: float) -> HostEpisode:
        """Fork the process of an episode. Raises HostError."""
        local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        number, status = next(self._numbers), asyncio.get_running_loop().create_future()
        with remote:
            try:
                await asyncio.wait_for(self._send_fork(number, remote), seconds)
            except (OSError, asyncio.TimeoutError) as error:
                local.close()
                raise HostError(
                    f"the host of {', '.join(self._settings.environments)} forks nothing: {error!r}"
                ) from error
        self._statuses[number] = status
        reader, writer = await asyncio.open_unix_connection(sock=local, limit=MAX_ANSWER_BYTES)
        return HostEpisode(number, reader, writer, status)

    async def _send_fork(self, number: int, episode_socket: socket.socket) -> None:
        while True:
            if not self.alive or self._channel is None:
                raise ConnectionError("it has exited")
            with contextlib.suppress(BlockingIOError):
                socket.send_fds(self._channel, [json.dumps({"fork": number}).encode()], [episode_socket.fileno()])
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def end(self, episode: HostEpisode, *, gently: bool = True) -> None:
        """End an episode's process: `gently` gives it two seconds to close its environment."""
        episode.disconnect()
        if self.alive and self._channel is not None:
            message = json.dumps({"end": episode.number, "gently": gently}).encode()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(self._channel, message), _CLOSE_SECONDS)

    async def close(self) -> None:
        """End the fork server, which ends all its episodes."""
        self.alive = False
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            loop = asyncio.get_running_loop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await loop.run_in_executor(None, self._process.wait, _CLOSE_SECONDS)
            self._process.kill()
            await loop.run_in_executor(None, self._process.wait)
