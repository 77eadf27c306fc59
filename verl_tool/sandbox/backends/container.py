"""A trajectory's workspace as a container, by the command line of docker or podman.

    async with Container(ContainerSettings("docker", "python:3.12-slim"), SessionLimits()) as container:
        result = await container.exec("ls -l")

It has no network, a read-only root, two writable folders in memory (the work folder and /tmp), no capabilities, and no
environment of ours. It lives as long as a process of the command line whose stdin is a pipe of ours: when this process
ends, in whatever way, the pipe closes, and the container ends and is removed (``--rm``). The image needs ``bash`` and
the usual file tools, ``tar`` for `upload` and `download`, ``python3`` for cells, ``stty`` for a clean terminal.
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
"""Of every container, so that they can be found: ``docker ps --filter label=verl-tool``."""
_START_SECONDS = 120.0
"""An image that is not there yet may have to be pulled."""
_OWN_SECONDS = 20.0
"""For what the command line itself does: to remove a container, to end a command."""
_MARGIN_SECONDS = 10.0
"""Of a command beside its own time: to get into the container and out."""
_OWN_PROCESSES = 8
"""That are not the model's: the init process, what the container lives by, what runs cells."""
_MAX_USER_PROCESSES = 1 << 14
"""What a command line may allow its containers is less than what this process may, and cannot be asked for."""
_USER = "65534:65534"
_CANNOT_RUN = 126
_READY = b"ready\n"
_ALIVE = f"printf '{_READY.decode().strip()}\\n'; exec cat > /dev/null"
COMMAND_VARIABLE = "VERL_TOOL_COMMAND"
_BEGIN = 'printf "%s\\n" "$0" >&2 && exec "$@"'
"""Says that a command begins: what has not said so, the command line has not run, and its words are not a program's."""
_KILL = """
for try in 1 2 3; do
    for folder in /proc/[0-9]*; do
        if { mapfile -d '' -t variables < "$folder/environ"; } 2>/dev/null; then
            case " ${variables[*]} " in *" $1 "*) kill -KILL "${folder#/proc/}" 2>/dev/null ;; esac
        fi
    done
done
"""
"""Kills the processes whose environment has ``$1``. Those that have dropped it are left, and end with the container."""


@dataclass(frozen=True)
class ContainerSettings:
    command: str
    """``docker`` or ``podman``, or another program that understands the same arguments."""
    image: str
    cpus: float = 1.0
    """CPU time a second, of all its processes together."""
    readable: tuple[str, ...] = ()
    """Files and folders of this machine that are mounted at the same paths, and cannot be changed."""
    writable: bool = False
    """The image's own user runs in it, and may change the image's files."""

    def __post_init__(self) -> None:
        if not self.image or self.image.startswith("-"):
            raise ConfigError(f"image is {self.image!r}; give the name of an image that has bash, such as debian:12")
        for path in self.readable:
            if not Path(path).is_absolute() or ":" in path or not Path(path).exists():
                raise ConfigError(f"{path!r} is to be readable in the container; give an absolute path that is there")
        if not self.cpus > 0:
            raise ConfigError(f"cpus is {self.cpus}; it must be above 0")


class Container:
    """One container. `start` and `stop` it, or use it as a context manager; see `WorkspaceSandbox`."""

    def __init__(self, settings: ContainerSettings, limits: SessionLimits) -> None:
        """Nothing is started yet. Raises ConfigError if there is no such command line."""
        self.engine = ContainerEngine(settings.command)
        self.name = f"verl-tool-{secrets.token_hex(8)}"
        self._settings, self.limits = settings, limits
        self._lock = asyncio.Lock()
        self._life: asyncio.subprocess.Process | None = None
        """What the container lives as long as."""
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
        """Raises SandboxError if the container cannot be started."""
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
        """A container does not look after its own idle time."""

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
        """A cell of Python, by the image's own python3. As of `Session.run`, but that stdout stands before stderr in
        `output`, and that processes which a cell leaves behind run on until the container ends."""
        async with self._turn():
            if self._wall >= self.limits.total_wall_seconds:
                return self._cells.refused("total_wall_seconds")
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
        """Raises SandboxError: neither command line can copy a container whose processes run."""
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

    # What the parts of a container use.

    def require(self) -> None:
        """Raises ToolFault ``state_lost`` if it is gone."""
        if not self._lost and self._life is not None and self._life.returncode is not None:
            self._lost = f"the container {self.name} has ended"
        if self._lost:
            raise ToolFault(FaultKind.STATE_LOST, self._lost, retryable=False)

    def wall_left(self, wanted: float | None) -> float:
        left = self.limits.total_wall_seconds - self._wall
        return max(0.01, min(self.limits.wall_seconds if wanted is None else wanted, left))

    def exec_arguments(self, mark: str, env: Mapping[str, str], cwd: str, *options: str) -> list[str]:
        """``exec`` and its options, for a command whose processes `kill` finds by `mark`."""
        variables = {COMMAND_VARIABLE: mark, **env}
        named = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        return ["exec", *options, "--workdir", _absolute(cwd), *named, self.name]

    async def inside(
        self, command: Sequence[str], stdin: bytes, seconds: float, env: Mapping[str, str], cwd: str, most: int
    ) -> Ran:
        """Run a command in the container; one whose time is up is killed with what it has started. One that no program
        can be given has the exit code of a shell, 126. Raises ToolFault ``state_lost`` if the container has ended,
        SandboxError if the command line did not run it."""
        mark = secrets.token_hex(8)
        started = f"{mark}\n".encode()
        arguments = [*self.exec_arguments(mark, env, cwd, "--interactive"), "bash", "-c", _BEGIN, mark, *command]
        whole = False
        try:
            ran = await self.engine.run(arguments, seconds=seconds, stdin=stdin, most=most)
            whole = ran.code is not None
        except OSError as error:
            whole, reason = True, os.strerror(error.errno or errno.EINVAL).encode()
            return Ran(_CANNOT_RUN, b"", reason, 0, len(reason))
        finally:
            if not whole:
                await asyncio.shield(self.kill(mark))
        if not ran.stderr.startswith(started):
            await self.look()
            complaint = ran.stderr[:300].decode(errors="replace").strip() or "nothing"
            words = f"{self.engine.command} exec did not run a command; it says {complaint!r}"
            raise SandboxError(words, retryable=True)
        return replace(ran, stderr=ran.stderr[len(started) :], stderr_bytes=ran.stderr_bytes - len(started))

    async def kill(self, mark: str) -> None:
        """Kill the processes of a command. If that fails, the container is stopped."""
        script = ["bash", "-c", _KILL, "bash", f"{COMMAND_VARIABLE}={mark}"]
        ran = await self.engine.run([*self.exec_arguments("", {}, "/"), *script], seconds=_OWN_SECONDS)
        if ran.code is None:
            self._lost = self._lost or f"the container {self.name} no longer answers"
            self.stop_soon()

    def stop_soon(self) -> None:
        """In a task of its own."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())

    async def look(self) -> None:
        """See whether it still runs commands. Raises ToolFault ``state_lost`` if not."""
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
        return [
            *("run", "--interactive", "--rm", "--init", "--name", self.name, "--label", LABEL),
            *("--network", "none", *(() if self._settings.writable else ("--read-only", "--user", _USER))),
            *(word for path in self._settings.readable for word in ("--volume", f"{path}:{path}:ro")),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)),
            *("--pids-limit", str(limits.processes + _OWN_PROCESSES), "--cpus", f"{self._settings.cpus:g}"),
            *("--ulimit", f"nofile={limits.open_files}:{limits.open_files}"),
            # One --ulimit replaces all that the command line would set by itself: without this one podman asks for more
            # processes than a machine without CAP_SYS_RESOURCE gives. It counts those of all containers together, for
            # they have one user: what bounds one container is --pids-limit.
            *("--ulimit", f"nproc={_user_processes()}:{_user_processes()}"),
            *("--tmpfs", f"{wire.WORK_DIRECTORY}:{folder}", "--tmpfs", f"/tmp:{folder}"),
            *("--workdir", wire.WORK_DIRECTORY, "--env", f"HOME={wire.WORK_DIRECTORY}", "--env", "TMPDIR=/tmp"),
            *("--entrypoint", "sh", self._settings.image, "-c", _ALIVE),
        ]


def _user_processes() -> int:
    """As many processes of one user as this process may allow a program."""
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
