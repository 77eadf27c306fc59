"""A trajectory's workspace: one session in the sandbox for all the tools that are served together.

What one tool writes into a file another reads. Each tool keeps what it needs beside the session as a
`WorkspacePart`, made when the tool is first called.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol, TypeVar

from pydantic import Field, model_validator

from verl_tool.content.packed_files import unpack
from verl_tool.errors import ConfigError, SandboxError, ToolFault
from verl_tool.protocol import FILES_FIELD, WORKSPACE_IMAGE_FIELD, WORKSPACE_LIMITS_FIELD, FaultKind
from verl_tool.sandbox import WARM_MODULES, Level, Policy, Session, SessionLimits
from verl_tool.sandbox.backends import Container, ContainerPool, ContainerSettings, WorkspaceSandbox
from verl_tool.sandbox.backends.egress import narrow_hosts
from verl_tool.sandbox.backends.providers import find_provider
from verl_tool.sandbox.backends.row_limits import check_row_limits
from verl_tool.sandbox.limits import CONTAINER_OPEN_FILES
from verl_tool.servers.tools._sandboxed import PolicyOptions, SandboxTool
from verl_tool.servers.tools.base import Context, Tool, ToolOptions
from verl_tool.servers.tools.workspace.layout import filled, started
from verl_tool.servers.tools.workspace.pools import PoolSettings, give_pool, take_pool
from verl_tool.servers.tools.workspace.verifier import SHARED_FOLDERS, verify, verify_in_place
from verl_tool.util.slots import Pausable
from verl_tool.verification import Verdict, Verification
from verl_tool.workspace_limits import NO_LIMITS, WorkspaceLimits


class WorkspaceOptions(PolicyOptions):
    """The limits of a call, of a workspace, and of all workspaces. All but the first two, and what `ToolOptions` has,
    must be the same for tools that are served together, for they share workspaces."""

    backend: Literal["sandbox", "docker", "podman", "kubernetes", "modal", "e2b", "daytona"] = "sandbox"
    """Where workspaces are: sessions of this project's sandbox, or a container for each trajectory."""
    provider: dict[str, Any] = Field(default_factory=dict)
    """Settings of the back end's own: namespace of a cluster, region of a service."""
    image: str = ""
    """Of the containers. It needs bash, and what the tools use: python3 for ``ipython_code``."""
    allowed_images: tuple[str, ...] = ()
    """Patterns (fnmatch) of images that rows may name as their ``workspace_image``, such as ``swebench/*``. With none,
    a row may name `image` only."""
    writable: bool = False
    """Programs are the image's own user, may change its files, and start in its working directory."""
    trust_image: bool = False
    """Of images whose user is root: verifiers see all that was changed, and run the image's programs as they were left.
    Without it, they see the work folder and /tmp, on a fresh image."""
    shared_verifier: bool = False
    """If `writable`: verifiers run in the trajectory's container, beside all that still runs there, as Harbor's. A
    policy can then read the tests and write its reward; some tasks ask for a server that runs, and need it."""
    workdir: str = ""
    """Where programs start and relative paths begin, in place of the image's working directory (if `writable`) or of
    ``/box/work``. Back ends on other machines do not know that of an image: it is ``/`` there."""
    user: str = ""
    """If `writable`: the programs' user, in place of the image's. Back ends on other machines do not know that of an
    image: it is root there."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that programs in containers reach over a proxy, such as ``pypi.org`` or ``*.example.org:8443``. With none,
    there is no network."""
    warm_containers: int = Field(default=0, ge=0)
    """Containers of each of the eight images that were used last, `image` among them at first, that each replica starts
    before a trajectory needs them."""
    max_verifications: int | None = Field(default=None, ge=1)
    """Verifiers that run at once in each replica, by default two for each core. Further ones wait, which is not part of
    their time."""
    cpus: float = Field(default=1.0, gt=0)
    """CPU time a second of one container."""
    max_row_cpus: float | None = Field(default=None, gt=0)
    """What a row may request as ``cpus`` of its ``workspace_limits``, in place of `cpus`. None: up to `cpus`."""
    max_row_memory_mb: int | None = Field(default=None, ge=16)
    """What a row may request as ``memory_mb``, in place of ``max_memory_mb``. None: up to that."""
    max_disk_mb: int = Field(default=64, ge=1)
    """Files of one workspace, which are held in memory, of the same megabytes."""
    max_processes: int = Field(default=32, ge=4)
    """Processes and threads of one call, and of the shell with all its jobs."""
    total_seconds: float = Field(default=3600.0, gt=0)
    """Wall time that all calls of one trajectory may take together, the shell's apart."""
    idle_seconds: float = Field(default=1800.0, gt=0)
    """A workspace that no call uses for so long is ended; later calls get the fault ``state_lost``."""
    max_sessions: int = Field(default=256, ge=1)
    """Workspaces at once in each replica; the first call of a further trajectory gets the fault ``overloaded``."""
    warm_modules: tuple[str, ...] = WARM_MODULES
    """Modules that are imported once for all workspaces; any other is imported by each that uses it."""

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> WorkspaceOptions:
        other = _OF_CONTAINERS if self.backend == "sandbox" else _OF_THE_SANDBOX
        fields = WorkspaceOptions.model_fields
        changed = [name for name in other if getattr(self, name) != fields[name].get_default(call_default_factory=True)]
        if changed:
            raise ValueError(f"{changed[0]} has no effect with backend={self.backend!r}; leave it out")
        if self.backend != "sandbox" and not (self.image or self.allowed_images):
            raise ValueError(
                f"backend={self.backend!r} needs image, the name of one that is there or can be pulled, or "
                "allowed_images, patterns of those that rows may name"
            )
        if self.shared_verifier and not self.writable:
            raise ValueError("shared_verifier has no effect without writable; set writable, or leave it out")
        return self


_OF_CONTAINERS = (
    "image",
    "allowed_images",
    "writable",
    "trust_image",
    "shared_verifier",
    "workdir",
    "user",
    "allowed_hosts",
    "warm_containers",
    "cpus",
    "max_row_cpus",
    "max_row_memory_mb",
    "provider",
)
_OF_THE_SANDBOX = ("pre_import", "allowed_modules", "restricted_functions", "isolation", "warm_modules")
"""And ``workers``, which a server gives to all of its tools."""
_OF_EACH_TOOL = {*ToolOptions.model_fields, "timeout_seconds", "max_output_length"}


class WorkspacePart(Protocol):
    """What one tool keeps in a workspace."""

    def __init__(self, session: WorkspaceSandbox) -> None:
        """Nothing is started yet."""

    def copy_for(self, session: WorkspaceSandbox) -> WorkspacePart:
        """The same for a session that was forked from its own. Raises ToolFault ``not_forkable``."""

    async def close(self) -> None:
        """Give back what is not the session's."""


P = TypeVar("P", bound=WorkspacePart)


class Workspace:
    """The session of one trajectory, with the parts of its tools."""

    def __init__(self, session: WorkspaceSandbox) -> None:
        """`session`: started; `close` ends it."""
        self.session = session
        self._parts: dict[type, WorkspacePart] = {}

    def part(self, kind: type[P]) -> P:
        """The workspace's own instance of `kind`, made at first use."""
        found = self._parts.get(kind)
        if not isinstance(found, kind):
            found = self._parts[kind] = kind(self.session)
        return found

    async def verify(self, verification: Verification) -> Verdict:
        """What the verifier says of it, when all that its tools run has been ended; see `verifier.verify`. Raises
        ToolFault: ``bad_request`` if a branch lives, whose programs have the same user and could reach the verifier;
        ``state_lost``."""
        if isinstance(self.session, Session) and self.session.shared:
            words = (
                "a workspace cannot be verified while one that was forked from it, or with it, lives: programs of that "
                "one could reach the verifier; finish the other trajectories first"
            )
            raise ToolFault(FaultKind.BAD_REQUEST, words, retryable=False)
        parts, self._parts = self._parts, {}
        for part in parts.values():
            await part.close()
        return await verify(self.session, verification)

    async def fork(self) -> Workspace:
        """A second workspace with the same Python state, files, and whatever else the tools keep. Raises ToolFault:
        ``not_forkable`` if something of it cannot be copied, such as a program that runs, or a shell; ``overloaded``,
        ``state_lost``. Raises SandboxError if the sandbox failed."""
        try:
            session = await self.session.fork()
        except SandboxError as error:
            if error.retryable:
                raise
            raise ToolFault(FaultKind.NOT_FORKABLE, str(error), retryable=False) from error
        try:
            branch = Workspace(session)
            branch._parts = {kind: part.copy_for(session) for kind, part in self._parts.items()}
        except BaseException:
            await session.stop()
            raise
        return branch

    async def close(self) -> None:
        """End the session and all that runs in it."""
        try:
            for part in self._parts.values():
                await part.close()
        finally:
            await self.session.stop()


class WorkspaceTool(SandboxTool):
    """A tool that works in its trajectory's workspace, which is ``context.state`` in `run`.

    A session that is lost, or for which there is no room, is a fault (`ToolFault`), never an observation.
    """

    stateful = True
    has_workspace = True
    Options = WorkspaceOptions
    options: WorkspaceOptions

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        chosen = self.options
        self._limits = SessionLimits(
            wall_seconds=chosen.timeout_seconds,
            memory_bytes=chosen.max_memory_mb << 20,
            disk_bytes=chosen.max_disk_mb << 20,
            processes=chosen.max_processes,
            total_wall_seconds=chosen.total_seconds,
            idle_seconds=chosen.idle_seconds,
        )
        policy = Policy(chosen.allowed_modules, chosen.restricted_functions, chosen.pre_import)
        level = Level.parse(chosen.isolation)
        # Each call brings its own wall time.
        shared = SessionLimits(**{**vars(self._limits), "wall_seconds": SessionLimits.wall_seconds})
        self._settings = PoolSettings(chosen.workers, chosen.warm_modules, chosen.max_sessions, policy, level, shared)
        self.verification_slots = asyncio.Semaphore(chosen.max_verifications or 2 * len(os.sched_getaffinity(0)))
        self._containers: ContainerPool | None = None
        if chosen.backend != "sandbox":
            settings = ContainerSettings(
                chosen.backend,
                chosen.image or chosen.allowed_images[0],
                chosen.cpus,
                writable=chosen.writable,
                trust_image=chosen.trust_image,
                user=chosen.user,
                workdir=chosen.workdir,
                folders=SHARED_FOLDERS if chosen.shared_verifier else (),
                provider=chosen.provider,
                allowed_hosts=chosen.allowed_hosts,
            )
            shared = replace(shared, open_files=CONTAINER_OPEN_FILES)
            self._containers = ContainerPool(settings, shared, chosen.warm_containers)
            # What a pool sees to for its sessions, the server sees to for containers.
            self.max_live, self.ttl_seconds = chosen.max_sessions, chosen.idle_seconds  # type: ignore[misc]

    @property
    def state_group(self) -> str:
        return "workspace"

    def reject_alongside(self, other: Tool) -> None:
        if not isinstance(other, WorkspaceTool):
            return
        own, others = self.options.model_dump(), other.options.model_dump()
        for name in WorkspaceOptions.model_fields:
            if name not in _OF_EACH_TOOL and own[name] != others[name]:
                raise ConfigError(
                    f"{name} is {own[name]!r} for {self.name} and {others[name]!r} for {other.name}, which share "
                    "workspaces; set it to the same value for both"
                )

    def isolation_in_force(self) -> str:
        if self._containers is None:
            return super().isolation_in_force()
        image = self.options.image or "of its row"
        return f"a container of {self.options.backend} for each trajectory, image {image}"

    async def start(self) -> None:
        if self._containers is None:
            self.sandbox = await take_pool(self._settings)
            return
        await find_provider(self.options.backend, self.options.provider).remove_orphans()
        if self.options.image:
            container = await self._containers.take()
            try:
                if not (await container.exec("true")).ok:
                    words = f"the image {self.options.image} has no bash, which tools need"
                    raise SandboxError(words, retryable=False)
            finally:
                await container.stop()
            self._containers.fill()

    async def close(self) -> None:
        if self._containers is not None:
            await self._containers.close()
        if self.sandbox is not None:
            self.sandbox = None
            await give_pool(self._settings)

    async def check(self) -> None:
        if self._containers is None:
            await super().check()

    async def new_state(self, context: Context) -> Workspace:
        packed = context.extra.get(FILES_FIELD)
        try:
            # Large ones take as long as a call of many others.
            files = {} if packed is None else await asyncio.to_thread(unpack, packed)
        except ConfigError as error:
            raise ToolFault(FaultKind.BAD_REQUEST, f"{FILES_FIELD}: {error}", retryable=False) from None
        image = self._image_of(context.extra.get(WORKSPACE_IMAGE_FIELD))
        limits = self._limits_of(context.extra.get(WORKSPACE_LIMITS_FIELD))
        try:
            if self._containers is None:
                return Workspace(await started(self._pool(), self._settings.limits, files))
            return Workspace(await filled(await self._containers.take(image, limits), files))
        except ConfigError as error:
            message = f"{FILES_FIELD} cannot be laid out in a workspace: {error}"
            raise ToolFault(FaultKind.SANDBOX, message, retryable=False) from None

    def _image_of(self, named: object) -> str:
        """The image that a row names; empty for the tool's own. Raises ToolFault."""
        options = self.options
        if named in (None, ""):
            if self._containers is not None and not options.image:
                words = f"the row names no {WORKSPACE_IMAGE_FIELD}, and the tool has no image; set image"
                raise ToolFault(FaultKind.BAD_REQUEST, words, retryable=False)
            return ""
        if self._containers is None:
            words = f"the row names the image {named!r:.200}, and the tool runs in the sandbox; serve it with backend"
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        allowed = (options.image, *options.allowed_images)
        if not isinstance(named, str) or not any(fnmatchcase(named, pattern) for pattern in allowed):
            patterns = list(options.allowed_images)
            words = f"the row names the image {named!r:.200}, which allowed_images={patterns} does not allow"
            raise ToolFault(FaultKind.BAD_REQUEST, words, retryable=False)
        return named

    def _limits_of(self, requested: object) -> WorkspaceLimits:
        """What a row requests of its container. Raises ToolFault."""
        options = self.options
        try:
            limits = WorkspaceLimits.parse(requested)
            check_row_limits(
                limits,
                options.max_row_cpus or options.cpus,
                options.max_row_memory_mb or options.max_memory_mb,
                options.allowed_hosts,
            )
        except ConfigError as error:
            raise ToolFault(FaultKind.BAD_REQUEST, str(error), retryable=False) from None
        if limits != NO_LIMITS and self._containers is None:
            words = f"the row has {WORKSPACE_LIMITS_FIELD}, and the tool runs in the sandbox; serve it with backend"
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        return limits

    async def verify(self, state: Workspace, verification: Verification) -> Verdict:
        try:
            narrow_hosts(self.options.allowed_hosts, verification.allowed_hosts or ())
        except ConfigError as error:
            raise ToolFault(FaultKind.BAD_REQUEST, f"the verifier: {error}", retryable=False) from None
        if self.options.shared_verifier:
            assert isinstance(state.session, Container)
            return await verify_in_place(state.session, verification)
        return await state.verify(verification)

    def pausable(self, state: Workspace) -> tuple[Pausable, ...]:
        return (state.session,) if isinstance(state.session, Session) else ()

    async def fork_state(self, state: Workspace) -> Workspace:
        return await state.fork()

    async def close_state(self, state: Workspace) -> None:
        await state.close()
