"""A workspace with a task's files: a session of the sandbox, or a container of the task's image."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from verl_tool.errors import ConfigError
from verl_tool.sandbox import RunResult, SandboxPool, Session, SessionLimits
from verl_tool.sandbox.backends import Container, ContainerSettings, WorkspaceSandbox
from verl_tool.sandbox.backends.image_builder import ImageBuilder
from verl_tool.servers.tools.workspace.layout import filled, lay_out, started
from verl_tool.tasks.task import SOLUTION, Task
from verl_tool.tasks.task_images import TaskImage
from verl_tool.verification import Verification

_SOLUTION_FOLDER = "/solution"
_DEFAULT_MEMORY_MB = 2048
_PROCESSES, _DISK_BYTES = 256, 1 << 30
"""Limits of a container. What it writes to its image is not limited."""


@dataclass(frozen=True)
class TaskWorkspaces:
    """Starts workspaces."""

    pool: SandboxPool
    builder: ImageBuilder | None = None
    images: Mapping[str, TaskImage] = field(default_factory=dict)
    """Images of the tasks that run in containers, by the tasks' names."""
    trust_image: bool = False
    """Of `ContainerSettings`."""

    def verification(self, task: Task) -> Verification:
        """The verifier of a task, as its user."""
        image = self.images.get(task.name)
        return task.verification if image is None else image.verification_of(task)

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[WorkspaceSandbox]:
        """Start a workspace. Raises ConfigError if files cannot be laid out, SandboxError, ToolFault."""
        workspace: Session | Container
        if task.name in self.images:
            workspace = Container(*self._settings(task))
            await workspace.start()
            await filled(workspace, task.files)
        elif task.needs_image:
            raise ConfigError(f"{task.needs_image}; run it in a container with --backend podman or docker")
        else:
            workspace = await started(self.pool, None, task.files)
        try:
            yield workspace
        finally:
            await workspace.close()

    def _settings(self, task: Task) -> tuple[ContainerSettings, SessionLimits]:
        assert self.builder is not None
        environment = task.environment
        settings = ContainerSettings(
            self.builder.engine.command,
            self.images[task.name].name,
            cpus=environment.cpus or 1.0,
            writable=True,
            trust_image=self.trust_image,
            folders=(_SOLUTION_FOLDER,),
            allowed_hosts=task.allowed_hosts,
        )
        limits = SessionLimits(
            memory_bytes=(environment.memory_mb or environment.memory or _DEFAULT_MEMORY_MB) << 20,
            processes=_PROCESSES,
            disk_bytes=_DISK_BYTES,
        )
        return settings, limits


async def lay_out_solution(task: Task, workspace: WorkspaceSandbox) -> None:
    """Write the files of ``solution/`` to ``/solution``. Raises ConfigError."""
    if isinstance(workspace, Session):  # its /solution is a link
        await workspace.exec(f"mkdir -p /box{_SOLUTION_FOLDER}")
    try:
        await lay_out(workspace, task.solution, _SOLUTION_FOLDER)
    except OSError as error:
        raise ConfigError(f"the solution cannot be written to {_SOLUTION_FOLDER}: {error}") from error


async def run_solution(task: Task, workspace: WorkspaceSandbox) -> RunResult:
    """Run ``solution/solve.sh``."""
    await lay_out_solution(task, workspace)
    return await workspace.exec(
        ["bash", f"{_SOLUTION_FOLDER}/{SOLUTION}"], wall_seconds=task.seconds, env=task.solution_env
    )
