"""A trajectory's workspace as a container, with the command line of docker or podman.

    async with Container(ContainerSettings("docker", "python:3.12-slim"), SessionLimits()) as container:
        result = await container.exec("ls -l")

It has no network, a read-only root, two writable folders in memory (the work folder and /tmp), no capabilities, and
none of the server's environment variables. The container runs until its stdin, a pipe of this process, is closed. When
this process ends for any reason, the container ends too and is removed (``--rm``). The image needs ``bash`` and the
usual file tools, ``tar`` for `upload` and `download`, ``python3`` for cells, and ``stty`` for a clean terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verl_tool.errors import ConfigError, SandboxError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.sandbox.backends import transfer
from verl_tool.sandbox.backends.cells import Cells
from verl_tool.sandbox.backends.engine import ContainerEngine, Ran, end
from verl_tool.sandbox.backends.protocol import NOTHING
from verl_tool.sandbox.backends.terminal import ContainerProgram
from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.job import encode
from verl_tool.sandbox.limits import SessionLimits
from verl_tool.sandbox.result import CellResult, RunResult, written

LABEL = "verl-tool=workspace"
"""Label of every container. ``docker ps --filter label=verl-tool`` lists them."""
_START_SECONDS = 120.0
"""Time to start a container, which may include pulling its image."""
_OWN_SECONDS = 20.0
"""Time for the command line itself, for example to remove a container or to end a command."""
_MARGIN_SECONDS = 10.0
"""Time for a command to enter and leave the container, in addition to its own time."""
_OWN_PROCESSES = 8
"""Number of processes that are not the model's: the init process, the main process, and those that run cells."""
_MAX_USER_PROCESSES = 1 << 14
"""Maximum for ``--ulimit nproc``. The engine's limit may be lower than that of this process, and cannot be queried."""
_USER = "65534:65534"
_CANNOT_RUN = 126
_READY = b"ready\n"
_ALIVE = f"printf '{_READY.decode().strip()}\\n'; exec cat > /dev/null"
COMMAND_VARIABLE = "VERL_TOOL_COMMAND"
_BEGIN = 'printf "%s\\n" "$0" >&2 && exec "$@"'
"""Reports on stderr that a command starts. Without the report, stderr contains an error of the command line itself."""
_KILL = """
for try in 1 2 3; do
    for folder in /proc/[0-9]*; do
        if { mapfile -d '' -t variables < "$folder/environ"; } 2>/dev/null; then
            case " ${variables[*]} " in *" $1 "*) kill -KILL "${folder#/proc/}" 2>/dev/null ;; esac
        fi
    done
done
"""
"""Kills the processes with ``$1`` in their environment. Those that removed it run until the container ends."""


@dataclass(frozen=True)
class ContainerSettings:
    command: str
    """``docker`` or ``podman``, or another program that understands the same arguments."""
    image: str
    cpus: float = 1.0
    """Maximum CPU time per second, for all processes together."""
    readable: tuple[str, ...] = ()
    """Files and folders of this machine that are mounted at the same paths, and cannot be changed."""
    writable: bool = False
    """The image's own user runs in it, and may change the image's files."""
    folders: tuple[str, ...] = ()
    """Further empty folders in memory, that its user may write to."""

    def __post_init__(self) -> None:
        if not self.image or self.image.startswith("-"):
            raise ConfigError(f"image is {self.image!r}; give the name of an image that has bash, such as debian:12")
        for path in self.readable:
            if not Path(path).is_absolute() or ":" in path or not Path(path).exists():
                raise ConfigError(f"{path!r} is to be readable in the container; give an absolute path that is there")
        if not self.cpus > 0:
            raise ConfigError(f"cpus is {self.cpus}; it must be above 0")


class Container:
    """One container. Call `start` and `stop`, or use it as a context manager. See `WorkspaceSandbox`."""

    def __init__(self, settings: ContainerSettings, limits: SessionLimits) -> None:
        """Store the settings. Raises ConfigError if the command line does not exist."""
        self.engine = ContainerEngine(settings.command)
        self.name = f"verl-tool-{secrets.token_hex(8)}"
        self._settings, self.limits = settings, limits
        self._lock = asyncio.Lock()
        self._life: asyncio.subprocess.Process | None = None
        """Process of the command line that ends with the container."""
        self._lost = "the container has not been started"
        self._stopping: asyncio.Task[None] | None = None
        self._cells = Cells(self)
        self._programs: set[ContainerProgram] = set()
        self._wall = 0.0

    async def __aenter__(self) -> Container:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the container. Raises SandboxError if that fails."""
        try:
            self._life = await self.engine.start(*self._run_arguments())
            assert self._life.stdout is not None
            first_line = await asyncio.wait_for(self._life.stdout.readline(), _START_SECONDS)
            if first_line != _READY:
                raise SandboxError(f"{self.engine.command} run failed: {await self._complaint()}", retryable=True)
            self._lost = ""
        except asyncio.TimeoutError:
            await self.stop()
            words = f"{self.engine.command} run: no container of image {self._settings.image} in {_START_SECONDS:g} s"
            raise SandboxError(words, retryable=True) from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        self._lost = self._lost or "the container was stopped"
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        await asyncio.shield(self._stopping)

    close = stop

    def touch(self) -> None:
        """Do nothing: containers have no idle time."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: str | bytes = "",
        wall_seconds: float | None = None,
        env: Mapping[str, str] = NOTHING,
        cwd: str = wire.WORK_DIRECTORY,
    ) -> RunResult:
        async with self._turn():
            if self._wall >= self.limits.total_wall_seconds:
                return _result(Ran(0, b"", b"", 0, 0), 0.0, "total_wall_seconds")
            seconds = self.wall_left(wall_seconds)
            started = time.monotonic()
            ran = await self.inside(_arguments(command), encode(stdin), seconds, env, cwd, self.limits.output_bytes)
            took = time.monotonic() - started
            return _result(ran, took, "wall_seconds" if ran.code is None else None)

    async def run(
        self,
        code: str,
        *,
        stdin: str | bytes = "",
        interactive: bool = False,
        wall_seconds: float | None = None,
        counted: bool = True,
    ) -> CellResult:
        """Run a cell of Python with the image's python3.

        Differences to `Session.run`: in `output`, stdout precedes stderr, and processes that a cell leaves running are
        not ended before the container.
        """
        async with self._turn():
            if self._wall >= self.limits.total_wall_seconds:
                return self._cells.exhausted("total_wall_seconds")
            return await self._cells.run(code, encode(stdin), interactive, counted, self.wall_left(wall_seconds))

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        streams: tuple[int, int, int],
        env: Mapping[str, str] = NOTHING,
        cwd: str = wire.WORK_DIRECTORY,
        terminal: bool = False,
    ) -> ContainerProgram:
        async with self._lock:
            self.require()
            program = ContainerProgram(self, _arguments(command), streams, env, _absolute(cwd), terminal)
            await program.start()
        self._programs.add(program)
        return program

    async def fork(self) -> Container:
        """Raise SandboxError, since neither engine can copy a running container."""
        raise SandboxError(f"a container of {self.engine.command} cannot be forked", retryable=False)

    async def read_file(self, path: str) -> bytes:
        async with self._turn():
            maximum, seconds = self.limits.disk_bytes, self.limits.wall_seconds + _MARGIN_SECONDS
            command = ["head", "-c", str(maximum + 1), "--", path]
            ran = await self.inside(command, b"", seconds, {"LC_ALL": "C"}, wire.WORK_DIRECTORY, maximum)
        if ran.stdout_bytes > maximum or ran.code is None:
            raise OSError(errno.EFBIG, f"more than {maximum} bytes, or not read in {seconds:g} s", path)
        if ran.code != 0:
            raise transfer.os_error(ran.stderr.decode(errors="replace"), path)
        return ran.stdout

    async def write_file(self, path: str, content: bytes) -> None:
        command = ["bash", "-c", 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"', "bash", path]
        async with self._turn():
            seconds = self.limits.wall_seconds + _MARGIN_SECONDS
            ran = await self.inside(command, content, seconds, {"LC_ALL": "C"}, wire.WORK_DIRECTORY, 1 << 12)
        if ran.code != 0:
            raise transfer.os_error(ran.stderr.decode(errors="replace"), path)

    async def upload(self, source: Path, target: str) -> None:
        await transfer.upload(self, source, target, self.limits.disk_bytes)

    async def download(self, source: str, target: Path) -> None:
        await transfer.download(self, source, target)

    # Methods for the parts of a container:

    def require(self) -> None:
        """Raise ToolFault ``state_lost`` if the container has ended."""
        if not self._lost and self._life is not None and self._life.returncode is not None:
            self._lost = f"the container {self.name} has ended"
        if self._lost:
            raise ToolFault(FaultKind.STATE_LOST, self._lost, retryable=False)

    def wall_left(self, requested: float | None) -> float:
        left = self.limits.total_wall_seconds - self._wall
        return max(0.01, min(self.limits.wall_seconds if requested is None else requested, left))

    def exec_arguments(self, mark: str, env: Mapping[str, str], cwd: str, *options: str) -> list[str]:
        """Return the arguments of ``exec`` for a command whose processes `kill` finds by `mark`."""
        variables = {COMMAND_VARIABLE: mark, **env}
        named = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        return ["exec", *options, "--workdir", _absolute(cwd), *named, self.name]

    async def inside(
        self, command: Sequence[str], stdin: bytes, seconds: float, env: Mapping[str, str], cwd: str, max_bytes: int
    ) -> Ran:
        """Run a command in the container. After `seconds`, it is killed with all processes that it started.

        The exit code is 126, as in a shell, if the arguments cannot be passed to a program. Raises ToolFault
        ``state_lost`` if the container has ended, and SandboxError if the command line did not run the command.
        """
        mark = secrets.token_hex(8)
        started = f"{mark}\n".encode()
        arguments = [*self.exec_arguments(mark, env, cwd, "--interactive"), "bash", "-c", _BEGIN, mark, *command]
        whole = False
        try:
            ran = await self.engine.run(arguments, seconds=seconds, stdin=stdin, max_bytes=max_bytes)
            whole = ran.code is not None
        except OSError as error:
            whole, reason = True, os.strerror(error.errno or errno.EINVAL).encode()
            return Ran(_CANNOT_RUN, b"", reason, 0, len(reason))
        finally:
            if not whole:
                await asyncio.shield(self.kill(mark))
        if not ran.stderr.startswith(started):
            await self.check()
            complaint = ran.stderr[:300].decode(errors="replace").strip() or "nothing"
            words = f"{self.engine.command} exec did not run a command; it says {complaint!r}"
            raise SandboxError(words, retryable=True)
        return replace(ran, stderr=ran.stderr[len(started) :], stderr_bytes=ran.stderr_bytes - len(started))

    async def kill(self, mark: str) -> None:
        """Kill the processes of a command, or else stop the container."""
        script = ["bash", "-c", _KILL, "bash", f"{COMMAND_VARIABLE}={mark}"]
        ran = await self.engine.run([*self.exec_arguments("", {}, "/"), *script], seconds=_OWN_SECONDS)
        if ran.code is None:
            self._lost = self._lost or f"the container {self.name} no longer answers"
            self.stop_soon()

    def stop_soon(self) -> None:
        """Stop the container in a task."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())

    async def check(self) -> None:
        """Run an empty command. Raises ToolFault ``state_lost`` if that fails."""
        arguments = [*self.exec_arguments("", {}, "/"), "bash", "-c", ":"]
        ran = await self.engine.run(arguments, seconds=_OWN_SECONDS)
        if ran.code != 0:
            self._lost = self._lost or f"the container {self.name} has ended"
            self.stop_soon()
        self.require()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        async with self._lock:
            self.require()
            started = time.monotonic()
            try:
                yield
            finally:
                self._wall += time.monotonic() - started

    async def _complaint(self) -> str:
        assert self._life is not None
        assert self._life.stderr is not None
        with contextlib.suppress(asyncio.TimeoutError):
            complaint = await asyncio.wait_for(self._life.stderr.read(2000), _OWN_SECONDS)
            return complaint.decode(errors="replace").strip()
        return "it says nothing"

    async def _stop(self) -> None:
        if self._life is None:
            return
        try:
            await self.engine.run(["rm", "--force", self.name], seconds=_OWN_SECONDS)
        finally:
            if self._life.stdin is not None:
                self._life.stdin.close()
            await end(self._life)
            await self._cells.hang_up()
            for program in self._programs:
                await program.hang_up()

    def _run_arguments(self) -> list[str]:
        limits, half = self.limits, self.limits.disk_bytes // 2
        folder = f"rw,exec,nosuid,nodev,mode=1777,size={half}"
        folders = (wire.WORK_DIRECTORY, "/tmp", *self._settings.folders)
        return [
            *("run", "--interactive", "--rm", "--init", "--name", self.name, "--label", LABEL),
            *("--network", "none", *(() if self._settings.writable else ("--read-only", "--user", _USER))),
            *(word for path in self._settings.readable for word in ("--volume", f"{path}:{path}:ro")),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)),
            *("--pids-limit", str(limits.processes + _OWN_PROCESSES), "--cpus", f"{self._settings.cpus:g}"),
            *("--ulimit", f"nofile={limits.open_files}:{limits.open_files}"),
            # One --ulimit replaces all defaults of the engine. Without this one, podman requests more processes than
            # are allowed without CAP_SYS_RESOURCE. It counts the processes of all containers, which share a user. The
            # limit of one container is --pids-limit.
            *("--ulimit", f"nproc={_user_processes()}:{_user_processes()}"),
            *(word for path in folders for word in ("--tmpfs", f"{path}:{folder}")),
            *("--workdir", wire.WORK_DIRECTORY, "--env", f"HOME={wire.WORK_DIRECTORY}", "--env", "TMPDIR=/tmp"),
            *("--entrypoint", "sh", self._settings.image, "-c", _ALIVE),
        ]


def _user_processes() -> int:
    """Return the maximum number of processes per user that this process can allow."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    return _MAX_USER_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, _MAX_USER_PROCESSES)


def _arguments(command: str | Sequence[str]) -> list[str]:
    words = ["bash", "-c", command] if isinstance(command, str) else list(command)
    if not words:
        raise ConfigError("a command has no words; give the program's name at least")
    return words


def _absolute(cwd: str) -> str:
    return cwd if cwd.startswith("/") else f"{wire.WORK_DIRECTORY}/{cwd}"


def _result(ran: Ran, seconds: float, limit_hit: str | None) -> RunResult:
    return RunResult(
        **written(ran.stdout, ran.stderr, ran.stdout_bytes, ran.stderr_bytes),
        exit_code=None if limit_hit else ran.code,
        signal=9 if limit_hit == "wall_seconds" else None,
        limit_hit=limit_hit,
        wall_seconds=seconds,
    )
