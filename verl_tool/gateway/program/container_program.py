"""Agent programs in containers: with the files of an image, the gateway's socket, and no network but the allowed
hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from pydantic import BaseModel, ConfigDict, Field, field_validator

from verl_tool.errors import ConfigError
from verl_tool.sandbox.backends import Container, ContainerSettings
from verl_tool.sandbox.backends.egress import EgressProxy, narrow_hosts
from verl_tool.sandbox.backends.providers import ELSEWHERE, find_provider
from verl_tool.sandbox.backends.providers.images import image_settings
from verl_tool.sandbox.backends.resident_client import ResidentProgram
from verl_tool.sandbox.backends.row_limits import apply_row_limits
from verl_tool.sandbox.inside.wire import WORK_DIRECTORY
from verl_tool.sandbox.limits import Limits, SessionLimits
from verl_tool.sandbox.sandboxed_service import SandboxedService
from verl_tool.verification import Verification
from verl_tool.workspace_limits import MIN_MEMORY_MB, NO_LIMITS, WorkspaceLimits

_TOTAL_SECONDS = 86400.0
"""Of all calls in a container: each has its own limit."""


class ContainerOptions(BaseModel):
    """How an image is run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = "docker"
    """``docker``, ``podman``, or another program that understands the same arguments."""
    cpus: float = Field(default=1.0, gt=0)
    """CPU time a second, of all its processes together."""
    max_row_cpus: float | None = Field(default=None, gt=0)
    """What a row may request as ``cpus`` of its ``workspace_limits``, in place of `cpus`. None: up to `cpus`."""
    max_row_memory_mb: int | None = Field(default=None, ge=MIN_MEMORY_MB)
    """What a row may request as ``memory_mb``, in place of the program's ``memory_bytes``. None: up to that."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that its processes reach over a proxy, in addition to the gateway."""
    workdir: str = ""
    """Where the program starts; the row's files are written there. Defaults to the image's working directory if
    `writable`, else to a folder in memory, ``/box/work``."""
    writable: bool = False
    """The program may change the image's files, as the image's own user, in a layer that is dropped at the end. Its
    size is not bounded."""

    @field_validator("engine")
    @classmethod
    def _is_on_this_machine(cls, engine: str) -> str:
        if engine in ELSEWHERE:
            raise ValueError(
                f"containers of {engine} are on other machines, which have neither the gateway's socket nor the "
                "agent's files; use docker or podman"
            )
        return engine

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        try:
            EgressProxy(hosts)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return hosts


def check_workdir(workdir: str, writable: bool) -> None:
    """Raise ConfigError for a folder that cannot be copied. writable: the image's files may be changed."""
    if not writable and PurePosixPath(workdir).parts[:3] != PurePosixPath(WORK_DIRECTORY).parts:
        raise ConfigError(
            f"gateway.program.container.workdir={workdir} cannot be written to, and a verifier checks it; "
            "set gateway.program.container.writable=true"
        )
    if not workdir.strip("/."):
        raise ConfigError(
            f"gateway.program.container.workdir={workdir} is the whole image, and a verifier gets a copy of that "
            "folder; set it to the folder of the task, such as /testbed"
        )


@dataclass(frozen=True)
class ProgramContainers:
    """Starts services in containers of an image, where `ServiceSandbox` starts them in the sandbox."""

    image: str
    options: ContainerOptions
    limits: Limits
    row_limits: WorkspaceLimits = NO_LIMITS
    """In place of those of `options` and `limits`."""

    def container(
        self,
        readable: tuple[str, ...] = (),
        workdir: str = "",
        folders: tuple[str, ...] = (),
        allowed_hosts: tuple[str, ...] | None = None,
    ) -> Container:
        """Return a container that has not been started; the arguments are of `ContainerSettings`. allowed_hosts: in
        place of its own."""
        options, bounds = self.options, self.limits
        settings = ContainerSettings(
            options.engine,
            self.image,
            options.cpus,
            readable,
            options.writable,
            workdir=workdir,
            folders=folders,
            allowed_hosts=options.allowed_hosts,
        )
        limits = SessionLimits(
            memory_bytes=bounds.memory_bytes,
            processes=bounds.processes,
            open_files=bounds.open_files,
            disk_bytes=bounds.disk_bytes,
            disk_files=bounds.disk_files,
            total_wall_seconds=_TOTAL_SECONDS,
        )
        settings, limits = apply_row_limits(self.row_limits, settings, limits)
        if allowed_hosts is not None:
            settings = replace(settings, allowed_hosts=allowed_hosts)
        return Container(settings, limits)

    async def check_verifier(self, verification: Verification) -> None:
        """Raise ConfigError for a verifier that cannot check its working directory, or reaches hosts that are not
        allowed."""
        check_workdir(await self.find_workdir(), self.options.writable)
        narrow_hosts(self.options.allowed_hosts, verification.allowed_hosts or ())

    async def find_workdir(self) -> str:
        """Return where its programs start. Raises as `spawn`."""
        options = self.options
        if options.workdir or not options.writable:
            return options.workdir or WORK_DIRECTORY
        return (await image_settings(find_provider(options.engine), self.image)).workdir

    async def spawn(self, service: SandboxedService, line_bytes: int) -> ContainerService:
        """Start a service with the environment of the image and its own; `readable` is at the same paths. Raises
        ConfigError if there is no such engine, and SandboxError if the container cannot be started."""
        container = self.container(tuple(dict.fromkeys(service.readable)))
        await container.start()
        try:
            workdir = await self.find_workdir()
            process = await container.spawn_inside(service.command, service.env, workdir, line_bytes=line_bytes)
        except BaseException:
            await container.stop()
            raise
        return ContainerService(container, process)


@dataclass(frozen=True)
class ContainerService:
    """A service in a container of its own. `end` it."""

    container: Container
    process: ResidentProgram

    async def end(self) -> None:
        """Remove the container, and with it all processes."""
        await self.container.stop()
