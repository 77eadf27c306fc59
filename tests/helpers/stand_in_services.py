"""Stand-ins for the packages ``modal`` 1.6, ``e2b`` 2.63 and ``daytona`` 0.226, made from their source: what the
providers call, with the same names and arguments. Their sandboxes are local processes, as in `stand_in_docker`.

Images: ``missing`` is not there, ``busy`` meets a limit, ``broken`` has no python3.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from stand_in_docker import MARK, confined, remove

_PYTHONS = [path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(path).exists()]
CAPABILITIES = ["SETUID", "SETGID", "KILL", "CHOWN", "SETPCAP", "DAC_OVERRIDE", "FOWNER", "FSETID"]


@dataclass
class StandInService:
    """Sandboxes of a service. `module` is its package."""

    folder: Path
    module: ModuleType
    created: list[dict[str, Any]] = field(default_factory=list)
    """Arguments, by sandbox."""
    renewed: int = 0
    keys: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, **arguments: Any) -> str:
        self.created.append({"name": name, **arguments})
        (self.folder / name / "repo").mkdir(parents=True)
        (self.folder / name / "repo" / "original").write_text("original")
        return name

    @property
    def live(self) -> list[str]:
        return sorted(os.listdir(self.folder))

    def remove(self, name: str) -> None:
        remove(self.folder / name)

    async def run(self, name: str, command: list[str], root: bool = True, **streams: Any) -> asyncio.subprocess.Process:
        capabilities = CAPABILITIES if root else []
        options = {"--cap-add": capabilities, "--tmpfs": ["/repo:"], "--workdir": ["/"]}
        broken = any(each["image"] == "broken" for each in self.created if each["name"] == name)
        words = confined(self.folder / name, command, options, _PYTHONS if broken else [])
        words[1:1] = [] if root else ["--unshare-user", "--uid", "1000", "--gid", "1000"]
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        environment = {"PATH": "/usr/bin:/bin" if broken else os.environ["PATH"], "HOME": "/", MARK: name}
        return await asyncio.create_subprocess_exec(*words, env=environment, **(streams or pipes))


def stand_in_service(name: str, folder: Path) -> StandInService:
    folder.mkdir()
    service = StandInService(folder, ModuleType(name))
    {"modal": _modal, "e2b": _e2b, "daytona": _daytona}[name](service)
    return service


def _both_ways(function: Callable[..., Any]) -> Any:
    """As synchronicity gives it."""
    return SimpleNamespace(aio=function)


def _modal(service: StandInService) -> None:
    class Error(Exception): ...

    names = "AuthError PermissionDeniedError NotFoundError InvalidError RemoteError UnimplementedError"
    errors = {name: type(name, (Error,), {}) for name in (*names.split(), "ResourceExhaustedError")}
    service.module.exception = SimpleNamespace(Error=Error, **errors)  # type: ignore[attr-defined]

    class Writer:
        def __init__(self, writer: asyncio.StreamWriter) -> None:
            self._writer, self._buffer = writer, b""
            self.drain = _both_ways(self._drain)

        def write(self, data: bytes) -> None:
            self._buffer += data

        async def _drain(self) -> None:
            data, self._buffer = self._buffer, b""
            self._writer.write(data)
            await self._writer.drain()

    async def read(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while data := await stream.read(1 << 16):
            yield data

    class Sandbox:
        def __init__(self, name: str) -> None:
            self._name = name
            self.exec, self.terminate = _both_ways(self._exec), _both_ways(self._terminate)

        async def _exec(self, *args: str, text: bool = True, workdir: str | None = None) -> Any:
            assert (text, workdir) == (False, "/")
            process = await service.run(self._name, list(args))
            assert process.stdin
            assert process.stdout
            assert process.stderr
            return SimpleNamespace(
                stdin=Writer(process.stdin), stdout=read(process.stdout), stderr=read(process.stderr)
            )

        async def _terminate(self, *, wait: bool = False) -> None:
            await asyncio.to_thread(service.remove, self._name)

        @staticmethod
        async def _create(
            *args: str,
            app: Any = None,
            name: str | None = None,
            tags: dict[str, str] | None = None,
            image: Any = None,
            timeout: int | None = 300,
            idle_timeout: int | None = None,
            cpu: float | tuple[float, float] | None = None,
            memory: int | tuple[int, int] | None = None,
            region: str | None = None,
            block_network: bool = False,
        ) -> Sandbox:
            assert args == ("sleep", "infinity")
            assert app == "verl-tool"
            if image == "missing":
                raise errors["RemoteError"]("Image build failed: manifest unknown")
            if image == "busy":
                raise errors["ResourceExhaustedError"]("too many sandboxes")
            assert name
            settings = {"image": image, "timeout": timeout, "cpu": cpu, "memory": memory, "block": block_network}
            return Sandbox(service.add(name, **settings))

        create = _both_ways(_create)

    async def lookup(name: str, *, create_if_missing: bool = False) -> str:
        assert create_if_missing
        return name

    service.module.Sandbox = Sandbox  # type: ignore[attr-defined]
    service.module.App = SimpleNamespace(lookup=_both_ways(lookup))  # type: ignore[attr-defined]
    service.module.Image = SimpleNamespace(  # type: ignore[attr-defined]
        from_registry=lambda tag, secret=None, *, add_python=None: tag
    )


def _e2b(service: StandInService) -> None:
    class SandboxException(Exception):
        def __init__(self, *words: str, status_code: int | None = None) -> None:
            super().__init__(*words)
            self.status_code = status_code

    module: Any = service.module
    module.AuthenticationException = type("AuthenticationException", (Exception,), {})
    for name in ("InvalidArgumentException", "NotFoundException", "TemplateException", "RateLimitException"):
        setattr(module, name, type(name, (SandboxException,), {}))

    class Handle:
        def __init__(self, process: asyncio.subprocess.Process, callbacks: dict[str, Callable[[str], None]]) -> None:
            self._process, self._pumps = process, [self._pump(*each) for each in callbacks.items()]
            self._wait = asyncio.ensure_future(asyncio.gather(*self._pumps))

        async def _pump(self, name: str, call: Callable[[str], None]) -> None:
            while data := await getattr(self._process, name).read(1000):
                call(data.decode())

        async def send_stdin(self, data: str | bytes, request_timeout: float | None = None) -> None:
            assert isinstance(data, bytes)
            assert self._process.stdin
            self._process.stdin.write(data)
            await self._process.stdin.drain()

        async def wait(self) -> None:
            await self._wait
            if await self._process.wait() != 0:
                raise SandboxException("Command exited with code and error")

    class Commands:
        def __init__(self, name: str) -> None:
            self._name = name

        async def run(
            self,
            cmd: str,
            background: bool | None = None,
            user: str | None = None,
            cwd: str | None = None,
            on_stdout: Any = None,
            on_stderr: Any = None,
            stdin: bool | None = None,
            timeout: float | None = 60,
            *,
            retain_output: bool = True,
        ) -> Handle:
            assert (background, cwd, stdin, timeout, retain_output) == (True, "/", True, 0, False)
            process = await service.run(self._name, ["/bin/bash", "-l", "-c", cmd], root=user == "root")
            return Handle(process, {"stdout": on_stdout, "stderr": on_stderr})

    class AsyncSandbox:
        def __init__(self, name: str) -> None:
            self._name, self.commands = name, Commands(name)

        @classmethod
        async def create(
            cls,
            template: str | None = None,
            timeout: int | None = None,
            metadata: dict[str, str] | None = None,
            allow_internet_access: bool | None = None,
        ) -> AsyncSandbox:
            if template == "missing":
                raise SandboxException("404: template 'missing' not found", status_code=404)
            if template == "busy":
                raise module.RateLimitException("429: Rate limit exceeded", status_code=429)
            assert metadata
            settings = {"image": template, "timeout": timeout, "block": allow_internet_access is False}
            return cls(service.add(metadata["name"], **settings))

        async def set_timeout(self, timeout: int) -> None:
            service.renewed += 1

        async def kill(self) -> bool:
            await asyncio.to_thread(service.remove, self._name)
            return True

    module.AsyncSandbox = AsyncSandbox


def _daytona(service: StandInService) -> None:
    class DaytonaError(Exception):
        def __init__(self, message: str, status_code: int | None = None) -> None:
            super().__init__(message)
            self.status_code = status_code

    module: Any = service.module
    module.DaytonaError = DaytonaError
    for name in ("Authentication", "NotFound", "BadRequest", "RateLimit", "Forbidden"):
        setattr(module, f"Daytona{name}Error", type(f"Daytona{name}Error", (DaytonaError,), {}))
    module.Resources = lambda cpu=None, memory=None, disk=None: {"cpu": cpu, "memory": memory, "disk": disk}

    @dataclass
    class CreateSandboxFromImageParams:
        image: str
        resources: Any = None
        name: str = ""
        os_user: str | None = None
        labels: dict[str, str] | None = None
        network_block_all: bool | None = None
        auto_stop_interval: int | None = None
        ttl_minutes: int | None = None
        ephemeral: bool | None = None
        target: str | None = None

    module.CreateSandboxFromImageParams = CreateSandboxFromImageParams

    class Terminal:
        def __init__(self, fd: int, process: asyncio.subprocess.Process, on_data: Callable[[bytes], None]) -> None:
            self._fd, self._process, self._on_data = fd, process, on_data
            os.set_blocking(fd, False)
            asyncio.get_running_loop().add_reader(fd, self._read)

        def _read(self) -> None:
            try:
                self._on_data(os.read(self._fd, 1 << 16))
            except OSError:
                asyncio.get_running_loop().remove_reader(self._fd)

        async def send_input(self, data: str | bytes) -> None:
            view = memoryview(data.encode() if isinstance(data, str) else data)
            while view:
                try:
                    view = view[os.write(self._fd, view) :]
                except BlockingIOError:
                    await asyncio.sleep(0.005)

        async def wait(self) -> Any:
            code = await self._process.wait()
            await asyncio.sleep(0.1)
            return SimpleNamespace(exit_code=code, error=None)

        async def disconnect(self) -> None:
            asyncio.get_running_loop().remove_reader(self._fd)
            with contextlib.suppress(OSError):
                os.close(self._fd)

    class AsyncSandbox:
        def __init__(self, name: str, root: bool) -> None:
            self._name, self._root, self.process = name, root, self

        async def create_pty_session(
            self, id: str, on_data: Callable[[bytes], None], cwd: str | None = None
        ) -> Terminal:
            assert cwd == "/"
            ours, theirs = pty.openpty()
            streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
            process = await service.run(self._name, ["bash", "--norc", "-i"], self._root, **streams)
            os.close(theirs)
            return Terminal(ours, process, on_data)

        async def refresh_activity(self) -> None:
            service.renewed += 1

        async def delete(self, timeout: float | None = 60) -> None:
            await asyncio.to_thread(service.remove, self._name)

    class AsyncDaytona:
        async def create(self, params: Any, *, timeout: float = 60) -> AsyncSandbox:
            if params.image == "missing":
                raise module.DaytonaNotFoundError("Failed to create sandbox: manifest unknown", status_code=404)
            if params.image == "busy":
                raise module.DaytonaForbiddenError("Total CPU quota exceeded", status_code=403)
            assert params.ephemeral
            settings = {**vars(params), "block": params.network_block_all}
            return AsyncSandbox(service.add(settings.pop("name"), **settings), params.os_user == "root")

        async def close(self) -> None: ...

    module.AsyncDaytona = AsyncDaytona
