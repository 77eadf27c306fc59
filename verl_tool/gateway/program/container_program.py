"""Agent programs in containers: with the files of an image, no network, and the gateway's socket."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends.container import Container, ContainerSettings
from verl_tool.sandbox.backends.engine import end
from verl_tool.sandbox.inside.wire import WORK_DIRECTORY
from verl_tool.sandbox.limits import Limits, SessionLimits
from verl_tool.sandbox.sandboxed_service import SandboxedService

_STARTS = 8
"""Containers of a worker process that are started at a time."""
_starting = asyncio.Semaphore(_STARTS)


class ContainerOptions(BaseModel):
    """How an image is run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = "docker"
    """``docker``, ``podman``, or another program that understands the same arguments."""
    cpus: float = Field(default=1.0, gt=0)
    """CPU time a second, of all its processes together."""
    workdir: str = WORK_DIRECTORY
    """Where the program starts; the row's files are written there."""
    writable: bool = False
    """The program may change the image's files, as the image's own user, in a layer that is dropped at the end. Its
    size is not bounded."""


@dataclass(frozen=True)
class ProgramContainers:
    """Starts services in containers of an image, where `ServiceSandbox` starts them in the sandbox."""

    image: str
    options: ContainerOptions
    limits: Limits

    async def spawn(self, service: SandboxedService, line_bytes: int) -> ContainerService:
        """Start a service with the environment of the image and its own; `readable` is at the same paths. Raises
        ConfigError if there is no such engine, and SandboxError if the container cannot be started."""
        bounds = self.limits
        limits = SessionLimits(
            memory_bytes=bounds.memory_bytes,
            processes=bounds.processes,
            open_files=bounds.open_files,
            disk_bytes=bounds.disk_bytes,
        )
        options = self.options
        settings = ContainerSettings(
            options.engine, self.image, options.cpus, tuple(dict.fromkeys(service.readable)), options.writable
        )
        container = Container(settings, limits)
        async with _starting:
            await container.start()
        try:
            arguments = container.exec_arguments(secrets.token_hex(8), service.env, options.workdir, "--interactive")
            process = await container.engine.start(*arguments, *service.command, line_bytes=line_bytes)
        except OSError as error:
            await container.stop()
            words = f"{options.engine} cannot be given the program: {error.strerror}"
            raise SandboxError(words, retryable=False) from error
        except BaseException:
            await container.stop()
            raise
        return ContainerService(container, process)


@dataclass(frozen=True)
class ContainerService:
    """A service in a container of its own. `end` it."""

    container: Container
    process: asyncio.subprocess.Process

    async def end(self) -> None:
        """Remove the container, and with it all processes."""
        try:
            await self.container.stop()
        finally:
            await end(self.process)
