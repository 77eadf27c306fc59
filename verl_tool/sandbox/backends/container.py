"""A trajectory's workspace as a container, which a provider starts (`providers`).

    async with Container(ContainerSettings("docker", "python:3.12-slim"), SessionLimits()) as container:
        result = await container.exec("ls -l")

Its first process is the *resident* (`inside.resident`), which runs commands, terminals and cells and moves files, and
with which this process speaks over one pipe. When this process ends for any reason, the pipe closes, the resident
exits, and the container is removed. It has no network, a read-only root, two writable folders in memory
(the work folder and /tmp), and none of the server's environment variables. Programs have no capabilities and another
user than the resident. The image needs ``sh``, ``bash`` for command lines, ``tar`` for `upload` and `download`, and
``python3`` for cells.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_tool.errors import ConfigError, LateError, SandboxError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.sandbox.backends import egress, transfer
from verl_tool.sandbox.backends.cells import Cells
from verl_tool.sandbox.backends.egress import EgressProxy
from verl_tool.sandbox.backends.inside import archive, trusted_paths
from verl_tool.sandbox.backends.protocol import NOTHING, unusable
from verl_tool.sandbox.backends.providers import find_provider
from verl_tool.sandbox.backends.providers.images import image_settings
from verl_tool.sandbox.backends.providers.protocol import ContainerSpec, PipedProcess
from verl_tool.sandbox.backends.request_folder import ContainerRequestFolder
from verl_tool.sandbox.backends.resident_client import ResidentClient, ResidentExitedError, ResidentProgram
from verl_tool.sandbox.backends.settings import ContainerSettings, ImageSettings
from verl_tool.sandbox.backends.terminal import ContainerProgram
from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.job import encode
from verl_tool.sandbox.limits import SessionLimits
from verl_tool.sandbox.result import CellResult, RunResult, written
from verl_tool.util.slots import hold_slot

_STARTS = 8
"""Containers of an event loop that are started at a time: engines fail when a hundred start at once."""
_OWN_SECONDS = 20.0
"""Time for an answer of the resident process to what takes it none."""
_END_SECONDS = 5.0
"""Time for a container to end when its pipe is closed. Afterwards it is removed by force."""
_MARGIN_SECONDS = 10.0
"""Time for an answer, in addition to a command's own time."""
_IN_MEMORY = (wire.WORK_DIRECTORY, "/tmp")
_USER = "65534:65534"
_CANNOT_RUN = 126
_COPY_SECONDS = 60.0
_COMPLAINT_BYTES = 2000
_LOADED_BEFORE = ("BASH_ENV", "ENV", "LD_PRELOAD")
"""Variables whose files a program reads before its own."""
_starting: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()


class Container:
    """One container. Call `start` and `stop`, or use it as a context manager. See `WorkspaceSandbox`."""

    def __init__(self, settings: ContainerSettings, limits: SessionLimits) -> None:
        """Store the settings. Raises ConfigError if the provider is not available."""
        self.provider = find_provider(settings.command, settings.provider)
        if settings.user and self.provider.same_user:
            raise ConfigError("user has no effect with same_user; leave it out")
        self.name = f"verl-tool-{secrets.token_hex(8)}"
        self._settings, self.limits = settings, limits
        self._lock = asyncio.Lock()
        self._process: PipedProcess | None = None
        """Its first process."""
        self._complaint = bytearray()
        """The beginning of what the command line and the resident print."""
        self._resident: ResidentClient | None = None
        self._lost, self._lost_kind = "the container has not been started", FaultKind.STATE_LOST
        self._stopping: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self.changed_by: tuple[int, tuple[int, ...]] | None = None
        """Numbers of the user, if not root, whose programs have changed its image, and of that user's groups."""
        self._cells = Cells(self)
        self._wall = 0.0
        self.pristine = True
        self.started_at = 0.0
        """Time of the start, in seconds since the epoch."""
        self.work_directory = settings.workdir or wire.WORK_DIRECTORY
        """Where its programs start. That of the image is known after `start`."""
        self._image = ImageSettings("", "")
        self._egress = EgressProxy(settings.allowed_hosts)

    @property
    def alive(self) -> bool:
        """Whether it takes calls."""
        return not self._lost and self._resident is not None and self._resident.alive

    async def __aenter__(self) -> Container:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the container, after others that are being started. Raises SandboxError if that fails."""
        try:
            await self._start_in_turn()
            self._lost = ""
        except asyncio.TimeoutError:
            await self.stop()
            words = f"no container of image {self._settings.image} in {self.provider.start_seconds:g} s"
            raise SandboxError(f"{self.provider.name} run: {words}", retryable=True) from None
        except BaseException:
            await self.stop()
            raise

    async def _start_in_turn(self) -> None:
        settings = self._settings
        self._image = settings.committed or await image_settings(self.provider, settings.image)
        if settings.user:
            self._image = replace(self._image, user=settings.user)
        if settings.writable and not settings.workdir:
            self.work_directory = self._image.workdir
        self.started_at = time.time()
        async with hold_slot(_starting.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_STARTS))):
            await asyncio.wait_for(self._start(), self.provider.start_seconds)

    async def _start(self) -> None:
        folders = (*_IN_MEMORY, *self._settings.folders)
        spec = ContainerSpec(self.name, self._settings, self.limits, folders)
        self._process = process = await self.provider.start(spec)
        self._listening = asyncio.get_running_loop().create_task(self._listen(process.stderr))
        self._resident = ResidentClient(process.stdout, process.stdin, process.lines)
        try:
            await self._resident.begin(self._inside())
            if self._settings.allowed_hosts:
                await self._resident.listen(egress.PORT, self._egress.accept)
        except (ResidentExitedError, ValueError):
            await asyncio.wait({self._listening}, timeout=_OWN_SECONDS)
            complaint = self._complaint.decode(errors="replace").strip() or "nothing"
            raise SandboxError(
                f"{self.provider.name} run failed: {complaint}; image: {self._settings.image}", retryable=True
            ) from None

    async def _listen(self, printed: asyncio.StreamReader) -> None:
        """Read what the provider prints, so that it can go on."""
        while data := await printed.read(1 << 16):
            self._complaint += data[: _COMPLAINT_BYTES - len(self._complaint)]

    async def stop(self) -> None:
        self._lost = self._lost or "the container was stopped"
        await asyncio.shield(self._stop_soon())

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
        cwd: str = ".",
    ) -> RunResult:
        async with self._turn():
            if self._wall >= self.limits.total_wall_seconds:
                return _result({"limit": "total_wall_seconds", "status": 0}, b"")
            seconds = self.wall_left(wall_seconds)
            return await self._run(_arguments(command), encode(stdin), seconds, env, self._absolute(cwd))

    async def run_apart(self, code: str, wall_seconds: float) -> RunResult:
        """Run Python with the resident's interpreter in a process of its own: the image's may be missing, or changed by
        its programs."""
        async with self._turn():
            return await self._run([], b"", wall_seconds, NOTHING, "/", python=code)

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
        not ended before the state is lost.
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
        cwd: str = ".",
        terminal: bool = False,
    ) -> ContainerProgram:
        program = await self.spawn_inside(_arguments(command), env, cwd, terminal=terminal)
        return ContainerProgram(program, streams, terminal)

    async def fork(self) -> Container:
        """Make a second container with the same files.

        Raises SandboxError with ``retryable=False`` if it has Python state or a program that runs: no engine copies
        processes without its own privileges on the machine.
        """
        async with self._turn() as client:
            if self._settings.writable and not self.provider.commits:
                words = f"a container of {self.provider.name} whose image's files may be changed cannot be copied"
                raise SandboxError(words, retryable=False)
            if client.programs:
                raise SandboxError(
                    f"a container of {self.provider.name} cannot be forked while it has Python state or a program "
                    "runs in it",
                    retryable=False,
                )
            branch = Container(await self._committed(), self.limits)
            try:
                await branch.start()
                branch.started_at = self.started_at
                complaint = await self._copy_to(branch, _COPY_SECONDS)
                if complaint:
                    raise SandboxError(f"the container's files cannot be copied: {complaint}", retryable=False)
            except BaseException:
                await branch.stop()
                raise
        return branch

    @contextlib.asynccontextmanager
    async def companion(
        self,
        limits: SessionLimits,
        folders: Sequence[str] = (),
        user: str = "",
        allowed_hosts: Sequence[str] | None = None,
    ) -> AsyncIterator[Container]:
        """Start a second container of the same image, for programs that judge the results of this one. folders, user
        and allowed_hosts: of `ContainerSettings`, the first in addition. It has what this one has changed of its image,
        but only the work folder if programs are root (see `trust_image`), or the provider does not commit.
        `copy_files` copies the rest. Raises the errors of `start`."""
        async with self._turn() as client:
            settings = self._settings.fresh() if self._copies_work_folder() else await self._committed()
        settings = replace(
            settings,
            folders=tuple(dict.fromkeys((*settings.folders, *folders))),
            user=user or settings.user,
            allowed_hosts=settings.allowed_hosts if allowed_hosts is None else tuple(allowed_hosts),
        )
        companion = Container(settings, limits)
        if settings.committed is not None and client.user[0] != 0:
            companion.changed_by = client.user[0], client.groups
        async with companion:
            yield companion

    async def trusted_variables(self, copied: Sequence[str] = ()) -> dict[str, str]:
        """Return variables for a program that must be the image's own. PATH and LD_LIBRARY_PATH have no folders that
        the programs of a trajectory could change: those in memory, the work folder and folders of `copied`, and those
        that the user of `changed_by` could. Nothing is loaded before it. Raises SandboxError if no folder of PATH is
        left."""
        if self._settings.trust_image:
            return {}
        changed = (*_IN_MEMORY, *((self.work_directory,) if self._settings.writable else ()), *copied)
        user, groups = self.changed_by or (None, ())
        code = f"{_source_of(trusted_paths)}\nmain({changed!r}, {user!r}, {groups!r})\n"
        found = await self.run_apart(code, _COPY_SECONDS)
        paths: dict[str, str] = json.loads(found.stdout) if found.ok else {}
        if not paths.get("PATH"):
            words = f"the image's user {self._image.user} could replace the programs of all folders of PATH"
            raise SandboxError(f"{words}; change the image, or set trust_image", retryable=False)
        return {**dict.fromkeys(_LOADED_BEFORE, ""), **paths}

    def changed_folders(self) -> tuple[str, ...]:
        """Return the folders whose contents a companion has: ``/`` if it has all changes. Raises SandboxError if it
        can have none."""
        if self._copies_work_folder():
            return (*_IN_MEMORY, self.work_directory)
        return (*_IN_MEMORY, "/") if self._settings.writable else _IN_MEMORY

    def extend_wall(self, seconds: float) -> None:
        """Let its further calls take so long together."""
        self._wall = 0.0
        self.limits = replace(self.limits, total_wall_seconds=max(self.limits.total_wall_seconds, seconds))

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Hosts that its programs reach."""
        return self._settings.allowed_hosts

    @property
    def trusts_image(self) -> bool:
        """Whether verifiers run the image's programs as they were left."""
        return self._settings.trust_image

    @property
    def is_writable(self) -> bool:
        """Whether its programs may change the image."""
        return self._settings.writable

    async def copy_files(self, target: Container, wall_seconds: float) -> str:
        """Copy the folders in memory to those of its companion, and the work folder if it has none of the changes,
        including modes, times and links. Returns the reason if not everything was copied, and otherwise an empty text.
        Raises ToolFault ``state_lost``, and SandboxError if it takes longer than `wall_seconds`."""
        async with self._turn():
            copied = self._copies_work_folder() and self.work_directory not in _IN_MEMORY
            return await self._copy_to(target, wall_seconds, (self.work_directory,) if copied else ())

    def request_folder(self, folder: str) -> ContainerRequestFolder:
        """The requests that its programs write to a folder, for `CommandRelay`."""
        return ContainerRequestFolder(self, folder)

    def whole(self) -> bool:
        """Return True: folders in memory are mounts. Whether the work folder is a link is checked in a companion."""
        return True

    async def _committed(self) -> ContainerSettings:
        """Settings for a container with the files of this one's image as they are now."""
        if not self._settings.writable:
            return self._settings
        try:
            image = await self.provider.commit(self.name)
        except SandboxError:
            self.require()
            raise
        original = self._settings.fresh().image
        return replace(self._settings, image=image, committed=self._image, original_image=original)

    def _copies_work_folder(self) -> bool:
        """Whether a companion has a fresh image with a copy of the work folder. Raises SandboxError if that folder
        cannot stand for all that programs have changed."""
        settings, is_root = self._settings, self.require().user[0] == 0
        if not settings.writable or (self.provider.commits and (settings.trust_image or not is_root)):
            return False
        if not is_root:
            reason = f"{self.provider.name} commits none, and programs are not root, who alone can copy all of it"
        elif not self.work_directory.strip("/"):
            reason = "its work folder is /; set workdir" + (", or trust_image" if self.provider.commits else "")
        else:
            return True
        raise SandboxError(f"the results of a container cannot be judged: {reason}", retryable=False)

    async def _copy_to(self, target: Container, wall_seconds: float, replaced: Sequence[str] = ()) -> str:
        """replaced: folders that are emptied before."""
        programs: list[ResidentProgram] = []
        complaints: list[asyncio.Future[bytes]] = []

        async def pump() -> None:
            folders = (*_IN_MEMORY, *replaced)
            packing = await self.spawn_inside([], cwd="/", python=_archive("pack", folders))
            programs.append(packing)
            unpacking = await target.spawn_inside([], cwd="/", python=_archive("unpack", folders, tuple(replaced)))
            programs.append(unpacking)
            complaints.extend(asyncio.ensure_future(program.stderr.read()) for program in programs)
            while data := await packing.stdout.read(1 << 16):
                unpacking.stdin.write(data)
                await unpacking.stdin.drain()
            unpacking.stdin.close()
            await unpacking.stdout.read()
            await asyncio.gather(*complaints, *(program.wait() for program in programs))

        try:
            await asyncio.wait_for(pump(), wall_seconds)
        except asyncio.TimeoutError:
            raise LateError(f"files were not copied within {wall_seconds:g} s", retryable=False) from None
        except ConnectionError:
            self.require()
            target.require()
            raise
        finally:
            for program in programs:
                program.kill()
            for complaint in complaints:
                complaint.cancel()
        if any(program.status is None for program in programs):  # a container has ended, which is nobody's doing
            self.require()
            target.require()
        texts = [complaint.result().decode(errors="replace").strip()[-_COMPLAINT_BYTES:] for complaint in complaints]
        codes = [program.returncode for program in programs]
        return "; ".join(text or f"exit code {code}" for code, text in zip(codes, texts, strict=True) if code)

    async def read_file(self, path: str) -> bytes:
        return (await self._ask_for_file("read", path, bytes=self.limits.disk_bytes))[1]

    async def write_file(self, path: str, content: bytes) -> None:
        await self._ask_for_file("write", path, content, make=True)

    async def _ask_for_file(
        self, operation: str, path: str, content: bytes = b"", **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        async with self._turn():
            return await self.ask_for_file(operation, path, content, **fields)

    async def upload(self, source: Path, target: str) -> None:
        await transfer.upload(self, source, target, self.limits.disk_bytes)

    async def download(self, source: str, target: Path) -> None:
        await transfer.download(self, source, target)

    async def end_programs(self) -> None:
        """End its Python state and all programs, and reset the wall time of its calls. Its files remain. Raises
        ToolFault ``state_lost`` if it has ended."""
        async with self._turn() as client:
            self._cells.forget()
            try:
                await asyncio.wait_for(client.ask("end"), _OWN_SECONDS)
            except asyncio.TimeoutError:
                raise self._no_answer() from None
            except OSError as error:
                words = f"the container's programs cannot be ended: {error.strerror}"
                raise SandboxError(words, retryable=True) from error
        self._wall = 0.0

    # Methods for the parts of a container:

    def require(self) -> ResidentClient:
        """Return what it is asked by. Raises ToolFault ``state_lost`` if the container has ended."""
        if not self._lost and not self.alive:
            self._lose(f"the container {self.name} has ended")
        if self._lost or self._resident is None:
            raise ToolFault(self._lost_kind, self._lost, retryable=False)
        return self._resident

    def _lose(self, reason: str) -> None:
        """Take no further calls, for a reason that is not this process's.

        Programs that are root can starve the resident, or have the kernel end it for its memory: of such a container
        nobody knows whether its end is their doing."""
        client = self._resident
        may_be_theirs = self._settings.writable and not self.pristine and client is not None and client.user[0] == 0
        self._lost, self._lost_kind = reason, FaultKind.TOOL_CRASHED if may_be_theirs else FaultKind.STATE_LOST

    def wall_left(self, requested: float | None) -> float:
        left = self.limits.total_wall_seconds - self._wall
        return max(0.01, min(self.limits.wall_seconds if requested is None else requested, left))

    async def ask_for_file(
        self, operation: str, path: str, content: bytes = b"", **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Read or write a file beside the calls. Raises OSError, and ToolFault ``state_lost``."""
        client = self.require()
        try:
            request = client.ask(operation, content, path=self._absolute(path), **fields)
            return await asyncio.wait_for(request, self.limits.wall_seconds + _MARGIN_SECONDS)
        except asyncio.TimeoutError:
            raise self._no_answer() from None
        except OSError as error:
            large = f"more than {fields.get('bytes')} bytes" if error.errno == errno.EFBIG and "bytes" in fields else ""
            raise OSError(error.errno, large or error.strerror, path) from None

    async def spawn_inside(
        self,
        command: Sequence[str],
        env: Mapping[str, str] = NOTHING,
        cwd: str = ".",
        *,
        terminal: bool = False,
        line_bytes: int = 0,
        python: str | None = None,
    ) -> ResidentProgram:
        """Start a program that runs beside the calls. line_bytes: the longest line that is read from it. python: code
        for the resident's interpreter, in place of a command. Raises ToolFault ``state_lost``, and SandboxError if no
        process can be started."""
        client = self.require()
        pristine, self.pristine = self.pristine, self.pristine and python is not None
        try:
            directory = self._absolute(cwd)
            started = client.spawn(command, env, directory, terminal=terminal, line_bytes=line_bytes, python=python)
            return await asyncio.wait_for(started, _OWN_SECONDS)
        except asyncio.TimeoutError:
            raise self._no_answer() from None
        except ResidentExitedError:
            self.require()
            raise
        except OSError as error:
            raise unusable(f"no program can be started in the container: {error.strerror}", pristine) from error

    async def _run(
        self,
        command: Sequence[str],
        stdin: bytes,
        seconds: float,
        env: Mapping[str, str],
        cwd: str,
        python: str | None = None,
    ) -> RunResult:
        """Run a command. At its end, or after `seconds`, all processes that it started are ended. The exit code is 126,
        as in a shell, if it cannot be run."""
        client = self.require()
        self.pristine = self.pristine and python is not None
        number = client.number()
        fields = {"argv": list(command), "env": dict(env), "cwd": cwd, "seconds": seconds, "python": python}
        work = asyncio.ensure_future(
            client.request(number, "run", stdin, bytes=self.limits.output_bytes, **fields),
        )
        try:
            return _result(*await asyncio.wait_for(asyncio.shield(work), seconds + _MARGIN_SECONDS))
        except asyncio.TimeoutError:
            raise self._no_answer() from None
        except OSError as error:
            reason = (os.strerror(error.errno or errno.EIO) + "\n").encode()
            nothing = {"status": _CANNOT_RUN << 8, "limit": None, "stored": [0, len(reason)]}
            return _result({**nothing, "written": [0, len(reason)]}, reason)
        finally:
            if not work.done():
                if client.alive:
                    client.post({"id": 0, "op": "kill", "of": number})
                await asyncio.wait({work}, timeout=_OWN_SECONDS)
                work.cancel()

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.work_directory}/{path}"

    def _no_answer(self) -> ToolFault:
        """Stop the container, whose resident process does not answer."""
        if not self._lost:
            self._lose(f"the container {self.name} no longer answers")
        self._stop_soon()
        return ToolFault(self._lost_kind, self._lost, retryable=False)

    def _stop_soon(self) -> asyncio.Task[None]:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        return self._stopping

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[ResidentClient]:
        async with self._lock:
            client = self.require()
            started = time.monotonic()
            try:
                yield client
            except ResidentExitedError:
                self.require()
                raise
            finally:
                self._wall += time.monotonic() - started

    async def _stop(self) -> None:
        process = self._process
        if process is None:
            await self._remove_image()
            return
        try:
            await self._egress.close()
            if self._resident is not None:
                await self._resident.close()
            ended = asyncio.ensure_future(process.wait())
            await asyncio.wait({ended}, timeout=_END_SECONDS)  # with its stdin closed, it ends by itself
            if not ended.done():
                ended.cancel()
                await self.provider.remove(self.name)
        finally:
            await process.end()
            if self._listening is not None:
                self._listening.cancel()
            await self._remove_image()

    async def _remove_image(self) -> None:
        if self._settings.committed is not None:
            await self.provider.remove_image(self._settings.image)

    def _inside(self) -> dict[str, Any]:
        """Arguments of the resident process."""
        writable = self._settings.writable
        home, user = (None, self._image.user) if writable else (wire.WORK_DIRECTORY, _USER)
        user = "" if self.provider.same_user else user
        env = {
            "TMPDIR": "/tmp",
            **(egress.VARIABLES if self._settings.allowed_hosts else {}),
            **dict(self._image.loader),
        }
        folder = self.work_directory if writable and self._settings.committed is None else ""
        return {"user": user, "home": home, "folder": folder, "env": env, "seconds": self._settings.max_seconds}


def _archive(*arguments: object) -> str:
    return f"{_source_of(archive)}\nrun{arguments!r}\n"


@cache
def _source_of(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text(encoding="utf-8")


def _arguments(command: str | Sequence[str]) -> list[str]:
    words = ["bash", "-c", command] if isinstance(command, str) else list(command)
    if not words:
        raise ConfigError("a command has no words; give the program's name at least")
    return words


def _result(answer: Mapping[str, Any], content: bytes) -> RunResult:
    limit, status = answer["limit"], answer["status"]
    sizes, at = answer.get("stored", [0, 0]), [0, answer.get("stored", [0])[0]]
    parts = []
    for stream, size in answer.get("order") or [[1, sizes[0]], [2, sizes[1]]]:
        parts.append(content[at[stream - 1] : at[stream - 1] + size])
        at[stream - 1] += size
    signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    stdout, stderr = content[: sizes[0]], content[sizes[0] :]
    stdout_bytes, stderr_bytes = answer.get("written", sizes)
    return RunResult(
        **written(stdout, stderr, stdout_bytes, stderr_bytes, b"".join(parts)),
        exit_code=None if limit or signalled else os.waitstatus_to_exitcode(status),
        signal=signalled,
        limit_hit=limit,
        wall_seconds=answer.get("seconds", 0.0),
    )
