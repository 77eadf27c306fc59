"""Run services, programs that communicate over stdin and stdout, inside or outside the sandbox.

    sandbox = ServiceSandbox()
    await sandbox.start()
    running = await sandbox.spawn(Service(("python", "-m", "mcp_server_time")))

A service in the sandbox is confined like a run: no network, no host files except a read-only interpreter and the
`readable` ones, a folder and a user of its own, the seccomp filter, and limits. No service sees the server's
environment variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_tool.errors import ConfigError, SandboxError
from verl_tool.sandbox.isolation import bubblewrap
from verl_tool.sandbox.isolation import interpreter as interpreters
from verl_tool.sandbox.isolation import levels as isolations
from verl_tool.sandbox.isolation.cgroup import ControlGroup
from verl_tool.sandbox.isolation.levels import Isolation, Level
from verl_tool.sandbox.isolation.seccomp import LOOPBACK_NEEDS, compile_filter
from verl_tool.sandbox.limits import Limits

_UID_BASE = 1 << 29
_UIDS = 1 << 9
"""Each service has a uid of its own, like runs (`worker`)."""
_UNMAPPED_UID = 65534
"""How a user of an empty user namespace appears (/proc/sys/kernel/overflowuid)."""
_USER = "sandbox"
_WORK = "/box/work"
_INHERITED = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG")
"""Variables of the server's environment that a program outside the sandbox sees. None of them is secret."""
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.01
_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class SandboxedService:
    """Settings of one service."""

    command: tuple[str, ...]
    """The program and its arguments. A program without a folder is searched beside the interpreter, then on PATH."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables, in addition to those that every program needs, such as PATH."""
    cwd: str | None = None
    """Working folder. Defaults to the service's own folder in the sandbox, and to the server's outside it."""
    readable: tuple[str, ...] = ()
    """Files and folders of the host that are readable in the sandbox, at the same paths."""
    loopback: bool = False
    """Whether it may use sockets in the sandbox: Unix sockets, and a loopback device that nobody else can reach."""
    sandboxed: bool = True
    """Whether it runs in the sandbox, and otherwise with the rights of the server."""


class RunningService:
    """A service in progress. Call `end` afterwards."""

    def __init__(
        self, transport: asyncio.SubprocessTransport, process: asyncio.subprocess.Process, release: Callable[[], None]
    ) -> None:
        self.process = process
        self._transport, self._release = transport, release

    async def end(self, grace_seconds: float = 0.0) -> None:
        """Close its stdin, wait `grace_seconds` for its end, and kill it with all processes that it started."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            await self._wait(grace_seconds)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            try:
                await self._wait(_KILL_SECONDS)
            finally:
                # Processes that it started may keep its pipes open.
                self._transport.close()
                release, self._release = self._release, _do_nothing
                release()

    async def _wait(self, seconds: float) -> None:
        """Wait for the end of the process. `Process.wait` also waits for its pipes, which others may keep open."""
        deadline = time.monotonic() + seconds
        while self.process.returncode is None and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)


class ServiceSandbox:
    """Starts services. `limits` apply to each, except those of wall time, CPU time and output."""

    def __init__(self, limits: Limits | None = None, required_level: Level | str = Level.full) -> None:
        """`required_level` is the minimum level of isolation, below which no service starts in the sandbox."""
        self._limits = limits or Limits(memory_bytes=1 << 30, processes=64)
        self._required = Level.parse(required_level)
        self._isolation: Isolation | None = None
        self._interpreter: interpreters.Interpreter | None = None
        self._group: ControlGroup | None = None
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Determine the isolation. Raises IsolationError if the required level is not available on this machine."""
        async with self._starting:
            if self._interpreter is not None:
                return
            found = await asyncio.to_thread(isolations.strongest)
            self._isolation = isolations.require(found, self._required)
            if self._isolation.level is not Level.none:
                memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 9 // 10
                self._group = await asyncio.to_thread(ControlGroup.create, memory)
            self._interpreter = await asyncio.to_thread(interpreters.inspect, sys.executable)

    def describe(self) -> str:
        """Describe the isolation. Empty before `start`, which the first service in the sandbox calls."""
        return "" if self._isolation is None else self._isolation.describe()

    async def close(self) -> None:
        """Remove the control group, after all services have ended."""
        group, self._group, self._interpreter = self._group, None, None
        if group is not None:
            await asyncio.to_thread(group.remove)

    async def spawn(self, service: SandboxedService, line_bytes: int = _LINE_BYTES) -> RunningService:
        """Start a service with pipes for stdin, stdout and stderr. `line_bytes` is the `limit` of asyncio's streams.

        Raises ConfigError if the program does not exist, and SandboxError if the process cannot be started.
        """
        if not service.sandboxed:
            return await self._spawn_unconfined(service, line_bytes)
        await self.start()
        assert self._isolation is not None
        if self._isolation.level is Level.none:
            return await self._spawn_unconfined(service, line_bytes)
        return await self._spawn_confined(service, self._isolation, line_bytes)

    async def _spawn_unconfined(self, service: SandboxedService, line_bytes: int) -> RunningService:
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        env["PATH"] = f"{os.path.dirname(sys.executable)}:{env.get('PATH', '/usr/bin:/bin')}"
        env |= service.env
        command = [_find_program(service.command[0], env["PATH"]), *service.command[1:]]
        return await _start(command, env, service.cwd, (), line_bytes, _do_nothing)

    async def _spawn_confined(self, service: SandboxedService, isolation: Isolation, line_bytes: int) -> RunningService:
        assert self._interpreter is not None
        folder = os.path.dirname(self._interpreter.executable)
        path = f"{folder}:/usr/local/bin:/usr/bin:/bin"
        program = _find_program(service.command[0], path)
        readable = _readable(service, program, self._interpreter.real_executable, by_others=isolation.as_root)
        procs_files, release = self._take_group()
        try:
            config = self._config(service, isolation, [program, *service.command[1:]], readable, procs_files)
            with contextlib.ExitStack() as files:
                config_fd = _readable_fd(files, json.dumps(config))
                users = {path: _readable_fd(files, text) for path, text in _user_files(config["uid"]).items()}
                command = bubblewrap.service_command(
                    isolation.bwrap, self._interpreter, config_fd, isolation.as_root, readable, users
                )
                return await _start(command, {}, "/", (config_fd, *users.values(), *procs_files), line_bytes, release)
        except BaseException:
            release()
            raise

    def _take_group(self) -> tuple[list[int], Callable[[], None]]:
        """Take a control group. Return the descriptors by which a service joins it, and a function that releases it."""
        pool = self._group
        if pool is None:
            return [], _do_nothing
        group = pool.take(self._limits.memory_bytes + self._limits.disk_bytes)
        try:
            return group.procs_files(), lambda: pool.give(group)
        except OSError:
            pool.give(group)
            raise

    def _config(
        self,
        service: SandboxedService,
        isolation: Isolation,
        command: list[str],
        readable: list[str],
        procs_files: list[int],
    ) -> dict[str, object]:
        """Return the settings that `inside.service` reads."""
        assert self._interpreter is not None
        folder = bubblewrap.place(os.path.dirname(self._interpreter.executable))
        env = {"PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin", "HOME": _WORK, "LANG": "C.UTF-8", **service.env}
        limits, number = self._limits, next(self._numbers)
        return {
            "command": command,
            "env": {"PYTHONDONTWRITEBYTECODE": "1", **env},
            "cwd": service.cwd or _WORK,
            "links": _links([self._interpreter.prefix, *readable]),
            "as_root": isolation.as_root,
            "uid": _UID_BASE + os.getpid() * _UIDS + number % _UIDS if isolation.as_root else 0,
            "filter": _socket_filter() if service.loopback else (isolation.run_filter or isolation.server_filter).hex(),
            "procs_files": procs_files,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "disk_files": limits.disk_files,
            "open_files": limits.open_files,
            "processes": limits.processes,
        }


def _user_files(uid: int) -> dict[str, str]:
    """Names of the program's user and group, without which some programs do not start."""
    number = uid or _UNMAPPED_UID
    return {
        "/etc/passwd": f"{_USER}:x:{number}:{number}::{_WORK}:/bin/sh\n",
        "/etc/group": f"{_USER}:x:{number}:\n",
    }


def _readable_fd(files: contextlib.ExitStack, text: str) -> int:
    """A descriptor that `text` can be read from while `files` is open."""
    file = files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  (closed by `files`)
    file.write(text.encode())
    file.seek(0)
    return file.fileno()


@functools.cache
def _socket_filter() -> str:
    return compile_filter(LOOPBACK_NEEDS).hex()


def _links(paths: list[str]) -> list[tuple[str, str]]:
    """Return the links to make in the sandbox: for each path that is mounted elsewhere, the path and its mount point.

    A path within another one is covered by the link of the other.
    """
    links: dict[str, str] = {}
    for path in sorted(paths):
        at = bubblewrap.place(path)
        if at != path and not any(path == above or path.startswith(above + "/") for above in links):
            links[path] = at
    return list(links.items())


def _readable(service: SandboxedService, program: str, interpreter: str, *, by_others: bool) -> list[str]:
    """Return the absolute paths that a service may read, including its program.

    Raises ConfigError if one is ``/``, does not exist, or is not readable `by_others` (for another user).
    """
    readable = [os.path.abspath(os.path.expanduser(each)) for each in service.readable]
    if os.path.realpath(program) != interpreter:
        readable.append(program)
    for each in readable:
        _check_readable(each, by_others)
    return readable


def _check_readable(path: str, by_others: bool) -> None:
    if path == "/":
        raise ConfigError("all of this machine (/) is to be readable in the sandbox; name single folders")
    if not os.path.exists(path):
        raise ConfigError(f"{path} is to be readable in the sandbox, but does not exist")
    bits = 0o005 if os.path.isdir(path) else 0o004
    if by_others and os.stat(path).st_mode & bits != bits:
        message = f"{path} is to be readable in the sandbox, where programs run as another user; chmod -R o+rX it"
        raise ConfigError(message)


def _find_program(name: str, path: str) -> str:
    found = shutil.which(os.path.expanduser(name), path=path)
    if found is None:
        apart = ", without its arguments" if " " in name else ""
        raise ConfigError(f"program {name!r} was not found in {path}; install it, or give its whole path{apart}")
    return os.path.abspath(found)


async def _start(
    command: list[str],
    env: Mapping[str, str],
    cwd: str | None,
    fds: tuple[int, ...],
    line_bytes: int,
    release: Callable[[], None],
) -> RunningService:
    """Start a process like `asyncio.create_subprocess_exec`, which does not give access to the transport."""
    pipe, loop = asyncio.subprocess.PIPE, asyncio.get_running_loop()
    try:
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(line_bytes, loop),
            *command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=dict(env),
            cwd=cwd,
            pass_fds=fds,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise SandboxError(f"{command[0]} cannot be started: {error}", retryable=True) from error
    return RunningService(transport, asyncio.subprocess.Process(transport, protocol, loop), release)


def _do_nothing() -> None:
    pass
