"""What providers on other machines have in common: settings, errors, and what they cannot do."""

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
_MARGIN_SECONDS = 30.0
"""For the resident, after a container has started."""
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
        words = f"backend={package!r} needs the package {package} ({error}); source scripts/env.sh {package}"
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
