"""What providers on other machines have in common: settings, errors, and a process whose streams an SDK passes on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_tool.errors import ConfigError, SandboxError
from verl_tool.sandbox.backends.providers.protocol import ContainerSpec
from verl_tool.sandbox.backends.settings import ImageSettings

LEASE_SECONDS = 300
"""After which a container ends that this process no longer renews."""
_RENEW_SECONDS = 60.0
_CALL_SECONDS = 60.0
"""For a call of a service that starts nothing."""
_MARGIN_SECONDS = 30.0
"""For the resident, after a container has started."""
_SENT_BYTES = 1 << 18
"""At a time: services limit their messages."""
_BUFFERED_BYTES = 1 << 20
_SCARCE = re.compile("quota|capacity|limit exceeded|rate limit", re.IGNORECASE)
_RETRIED_STATUSES = (408, 409, 425, 429)
_MAX_REASON_CHARACTERS = 500

T = TypeVar("T")
S = TypeVar("S", bound="RemoteSettings")


class RemoteSettings(BaseModel):
    """Settings that all providers on other machines have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start_seconds: float = Field(default=300.0, gt=0)
    """Time to start a container, with the time to fetch its image."""


def parse_settings(kind: type[S], name: str, values: Mapping[str, Any]) -> S:
    """Raises ConfigError."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigError(f"provider settings of {name}: {'; '.join(problems)}") from None


def import_sdk(package: str) -> ModuleType:
    """Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        words = f"backend={package!r} needs the package {package} ({error}); pip install 'verl-tool[{package}]'"
        raise ConfigError(words) from error


class RemoteProvider:
    """What such providers do alike. See `ContainerProvider`."""

    commits = False
    same_user = False

    def __init__(self, name: str, settings: RemoteSettings) -> None:
        self.name = name
        self.start_seconds = settings.start_seconds + _MARGIN_SECONDS

    async def describe(self, image: str) -> ImageSettings:
        """What is assumed of an image: it is fetched elsewhere."""
        return ImageSettings("0:0", "/")

    async def remove(self, name: str) -> None:
        """The end of its process has removed it."""

    async def commit(self, name: str) -> str:
        raise SandboxError(f"{self.name} makes no images of containers", retryable=False)

    async def remove_image(self, image: str) -> None:
        """None was made."""

    async def remove_orphans(self) -> int:
        """Those of processes that are gone end by themselves, within `LEASE_SECONDS`."""
        return 0

    def check(self, spec: ContainerSpec) -> None:
        """Raises SandboxError if it needs files of this machine."""
        if spec.settings.readable:
            words = f"{self.name} runs containers on other machines, where {spec.settings.readable[0]} is not"
            raise SandboxError(f"{words}; use docker or podman", retryable=False)

    def failure(self, action: str, error: Exception, final: tuple[type[Exception], ...] = ()) -> SandboxError:
        """The error to raise for one of an SDK. final: what another try does not change."""
        status = getattr(error, "status_code", None)
        refused = isinstance(status, int) and 400 <= status < 500 and status not in _RETRIED_STATUSES
        words = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARACTERS]
        retryable = not (refused or isinstance(error, final)) or bool(_SCARCE.search(str(error)))
        return SandboxError(f"{self.name} {action} failed: {words}", retryable=retryable)


async def finish_creation(creating: Coroutine[Any, Any, T], remove: Callable[[T], Awaitable[object]]) -> T:
    """Await a creation. If this is cancelled, what is created nevertheless is removed."""
    task = asyncio.ensure_future(creating)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        loop = asyncio.get_running_loop()

        async def undo() -> None:
            with contextlib.suppress(Exception):
                await remove(await task)

        _undoing.add(undoing := loop.create_task(undo()))
        undoing.add_done_callback(_undoing.discard)
        raise


_undoing: set[asyncio.Task[None]] = set()


class RelayedProcess:
    """The first process of a container, whose streams an SDK passes on. See `PipedProcess`.

    Subclasses override the methods that speak to the service; `begin` it when they can.
    """

    lines = False

    def __init__(self) -> None:
        # The resident sends no more than was requested, so that a limit here would only end lines.
        self.stdout, self.stderr = asyncio.StreamReader(limit=1 << 40), asyncio.StreamReader(limit=1 << 40)
        self.stdin = RelayedInput(self.send)
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._removed = False

    async def send(self, data: bytes) -> None:
        """Send to its stdin."""
        raise NotImplementedError

    async def watch(self) -> None:
        """Return when it has ended. Pass on what it writes, unless the SDK calls back."""
        raise NotImplementedError

    async def renew(self) -> None:
        """Have the container live for another `LEASE_SECONDS`."""

    async def remove(self) -> None:
        """End the container."""
        raise NotImplementedError

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(each) for each in (self._watch(), self._renew(), self._pump())]

    async def wait(self) -> None:
        await self._ended.wait()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close()
        if not self._removed:
            self._removed = True
            with contextlib.suppress(Exception):  # its lease ends
                await asyncio.wait_for(self.remove(), _CALL_SECONDS)

    async def _watch(self) -> None:
        try:
            await self.watch()
        except Exception as error:  # noqa: BLE001  (of an SDK: whatever it is, there is no more)
            self._fail(error)
        self._close()

    async def _pump(self) -> None:
        try:
            await self.stdin.pump()
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        self._close()  # closed by this side: `end` removes the container

    async def _renew(self) -> None:
        while True:
            # One that fails is repeated, and if all do, the container ends, which is seen by `watch`.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.renew(), _CALL_SECONDS)
            await asyncio.sleep(_RENEW_SECONDS)

    def _fail(self, error: Exception) -> None:
        if not self._ended.is_set():
            self.stderr.feed_data(f"{type(error).__name__}: {error}\n".encode(errors="replace"))

    def _close(self) -> None:
        if not self._ended.is_set():
            self.stdout.feed_eof()
            self.stderr.feed_eof()
            self._ended.set()


class RelayedInput:
    """Sends in order. See `ByteWriter`."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send, self._waiting = send, bytearray()
        self._written, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._closed = self._failed = False

    def write(self, data: bytes) -> None:
        self._waiting += data
        self._written.set()
        if len(self._waiting) >= _BUFFERED_BYTES:
            self._has_room.clear()

    def close(self) -> None:
        self._closed = True
        self._written.set()

    async def drain(self) -> None:
        await self._has_room.wait()
        if self._failed:
            raise ConnectionError

    async def pump(self) -> None:
        """Send what is written, until it is closed. Raises what sending does."""
        try:
            while True:
                await self._written.wait()
                data = bytes(self._waiting[:_SENT_BYTES])
                del self._waiting[: len(data)]
                if len(self._waiting) < _BUFFERED_BYTES:
                    self._has_room.set()
                if data:
                    await self._send(data)
                elif self._closed:
                    return
                else:
                    self._written.clear()
        finally:
            self._failed = True
            self._has_room.set()
