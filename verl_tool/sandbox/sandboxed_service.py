"""Programs that go on running, and are spoken to over their stdin and stdout: in the sandbox, or beside it.

    sandbox = ServiceSandbox()
    await sandbox.start()
    running = await sandbox.spawn(Service(("python", "-m", "mcp_server_time")))

A service in the sandbox is confined as a run is: no network, nothing of the host but a read-only interpreter and what
it is given to read, a folder and a user of its own, the seccomp filter, limits. None finds the server's environment.
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
"""Services have uids of their own, as runs have (`worker`)."""
_UNMAPPED_UID = 65534
"""How a user of an empty user namespace appears (/proc/sys/kernel/overflowuid)."""
_USER = "sandbox"
_WORK = "/box/work"
_INHERITED = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG")
"""What a program beside the sandbox finds of the server's environment: nothing that is secret."""
_KILL_SECONDS = 5.0
_LOOK_SECONDS = 0.01
_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class SandboxedService:
    command: tuple[str, ...]
    """The program and its arguments. A program without a folder is looked for beside the interpreter, then on PATH."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """All of its environment but what every program needs, such as PATH."""
    cwd: str | None = None
    """Where it starts; None: in its own folder in the sandbox, in that of the server beside it."""
    readable: tuple[str, ...] = ()
    """Files and folders of the host that it may read in the sandbox, at the same paths."""
    loopback: bool = False
    """In the sandbox it may use sockets: its own loopback device, on which nobody else listens, and Unix sockets."""
    sandboxed: bool = True
    """False: it runs with the server's own rights."""


class RunningService:
    """A service that was started. `end` it."""

    def __init__(
        self, transport: asyncio.SubprocessTransport, process: asyncio.subprocess.Process, release: Callable[[], None]
    ) -> None:
        self.process = process
        self._transport, self._release = transport, release

    async def end(self, grace_seconds: float = 0.0) -> None:
        """Close its stdin, give it `grace_seconds` to end, and kill it with all that it started."""
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
                # What it started may hold its pipes open for longer.
                self._transport.close()
                release, self._release = self._release, _nothing
                release()

    async def _wait(self, seconds: float) -> None:
        """Until it has ended. Not `Process.wait`, which waits for the ends of its pipes too, that others may hold."""
        deadline = time.monotonic() + seconds
        while self.process.returncode is None and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)


class ServiceSandbox:
    """Starts services, each with `limits` of its own (its wall time, CPU time and output are not bounded)."""

    def __init__(self, limits: Limits | None = None, required_level: Level | str = Level.full) -> None:
        """`required_level`: refuse to start services in the sandbox below it."""
        self._limits = limits or Limits(memory_bytes=1 << 30, processes=64)
        self._required = Level.parse(required_level)
        self._isolation: Isolation | None = None
        self._interpreter: interpreters.Interpreter | None = None
        self._group: ControlGroup | None = None
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Find the isolation. Raises IsolationError if this machine cannot give the level required."""
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
        """The isolation in force, in words; empty before `start`, which the first service in the sandbox calls."""
        return "" if self._isolation is None else self._isolation.describe()

    async def close(self) -> None:
        """Remove what `start` made; the services have ended."""
        group, self._group, self._interpreter = self._group, None, None
        if group is not None:
            await asyncio.to_thread(group.remove)

    async def spawn(self, service: SandboxedService, line_bytes: int = _LINE_BYTES) -> RunningService:
        """Start a service; its stdin, stdout and stderr are pipes. `line_bytes`: as `limit` of asyncio's streams.
        Raises ConfigError if there is no such program, and SandboxError if no process can be made."""
        if not service.sandboxed:
            return await self._spawn_plainly(service, line_bytes)
        await self.start()
        assert self._isolation is not None
        if self._isolation.level is Level.none:
            return await self._spawn_plainly(service, line_bytes)
        return await self._spawn_confined(service, self._isolation, line_bytes)

    async def _spawn_plainly(self, service: SandboxedService, line_bytes: int) -> RunningService:
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        env["PATH"] = f"{os.path.dirname(sys.executable)}:{env.get('PATH', '/usr/bin:/bin')}"
        env |= service.env
        command = [_program(service.command[0], env["PATH"]), *service.command[1:]]
        return await _started(command, env, service.cwd, (), line_bytes, _nothing)

    async def _spawn_confined(self, service: SandboxedService, isolation: Isolation, line_bytes: int) -> RunningService:
        assert self._interpreter is not None
        folder = os.path.dirname(self._interpreter.executable)
        path = f"{folder}:/usr/local/bin:/usr/bin:/bin"
        program = _program(service.command[0], path)
        readable = _readable(service, program, self._interpreter.real_executable, by_others=isolation.as_root)
        procs_files, release = self._group_of_one()
        try:
            config = self._config(service, isolation, [program, *service.command[1:]], readable, procs_files)
            with contextlib.ExitStack() as files:
                config_fd = _readable_fd(files, json.dumps(config))
                users = {path: _readable_fd(files, text) for path, text in _user_files(config["uid"]).items()}
                command = bubblewrap.service_command(
                    isolation.bwrap, self._interpreter, config_fd, isolation.as_root, readable, users
                )
                return await _started(command, {}, "/", (config_fd, *users.values(), *procs_files), line_bytes, release)
        except BaseException:
            release()
            raise

    def _group_of_one(self) -> tuple[list[int], Callable[[], None]]:
        """Descriptors by which a service joins a control group of its own, and what gives that back."""
        pool = self._group
        if pool is None:
            return [], _nothing
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
    ) -> dict[str, Any]:
        """What `inside.service` reads."""
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
    """Of what is not found at its own place, that place and where it is; of a path within another one, the other's."""
    links: dict[str, str] = {}
    for path in sorted(paths):
        at = bubblewrap.place(path)
        if at != path and not any(path == above or path.startswith(above + "/") for above in links):
            links[path] = at
    return list(links.items())


def _readable(service: SandboxedService, program: str, interpreter: str, *, by_others: bool) -> list[str]:
    """Whole paths of what a service may read, its program among them. Raises ConfigError."""
    readable = [os.path.abspath(os.path.expanduser(each)) for each in service.readable]
    if os.path.realpath(program) != interpreter:
        readable.append(program)
    for each in readable:
        _reject_unreadable(each, by_others)
    return readable


def _reject_unreadable(path: str, by_others: bool) -> None:
    """Raises ConfigError. `by_others`: the service is another user than we are."""
    if path == "/":
        raise ConfigError("all of this machine (/) is to be readable in the sandbox; name folders of it")
    if not os.path.exists(path):
        raise ConfigError(f"{path} is to be readable in the sandbox, and is not there")
    bits = 0o005 if os.path.isdir(path) else 0o004
    if by_others and os.stat(path).st_mode & bits != bits:
        raise ConfigError(f"{path} is to be readable in the sandbox, where programs are another user; chmod -R o+rX it")


def _program(name: str, path: str) -> str:
    found = shutil.which(os.path.expanduser(name), path=path)
    if found is None:
        apart = ", without its arguments" if " " in name else ""
        raise ConfigError(
            f"there is no program {name!r} (looked for in {path}); install it, or give its whole path{apart}"
        )
    return os.path.abspath(found)


async def _started(
    command: list[str],
    env: Mapping[str, str],
    cwd: str | None,
    fds: tuple[int, ...],
    line_bytes: int,
    release: Callable[[], None],
) -> RunningService:
    """As `asyncio.create_subprocess_exec`, which keeps to itself what must be closed."""
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


def _nothing() -> None:
    """Nothing is to be given back."""
