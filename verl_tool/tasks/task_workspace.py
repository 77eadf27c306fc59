"""A workspace with a task's files: a session of the sandbox, or a container of the task's image."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from verl_tool.content.packed_files import PackedFile
from verl_tool.errors import ConfigError
from verl_tool.sandbox import RunResult, SandboxPool, Session, SessionLimits
from verl_tool.sandbox.backends import Container, ContainerSettings
from verl_tool.sandbox.backends.image_builder import ImageBuilder
from verl_tool.servers.tools.workspace.layout import lay_out, started
from verl_tool.servers.tools.workspace.verifier import verify
from verl_tool.tasks.task import SOLUTION, Task
from verl_tool.tasks.task_images import TaskImage
from verl_tool.verification import Verdict

_SOLUTION_FOLDER = "/solution"
_DEFAULT_MEMORY_MB = 2048
_PROCESSES, _DISK_BYTES = 256, 1 << 30
"""Limits of a container. What it writes to its image is not limited."""


@dataclass(frozen=True)
class TaskWorkspace:
    """A workspace in which nothing has run yet."""

    sandbox: Session | Container
    cwd: str | None = None
    """The folder of the workspace in a container; None: that of the session."""

    async def exec(
        self, command: str | Sequence[str], wall_seconds: float | None = None, env: Mapping[str, str] | None = None
    ) -> RunResult:
        """Run a command in the workspace."""
        if self.cwd is None:
            return await self.sandbox.exec(command, wall_seconds=wall_seconds, env=env or {})
        return await self.sandbox.exec(command, wall_seconds=wall_seconds, env=env or {}, cwd=self.cwd)

    async def write_file(self, path: str, content: bytes) -> None:
        await self.sandbox.write_file(path if self.cwd is None else f"{self.cwd}/{path}", content)

    async def lay_out_solution(self, task: Task) -> None:
        """Write the files of ``solution/`` to ``/solution``."""
        if self.cwd is None:
            await self.sandbox.exec(f"mkdir -p /box{_SOLUTION_FOLDER}")
        await _lay_out(self.sandbox, task.solution, _SOLUTION_FOLDER)

    async def run_solution(self, task: Task) -> RunResult:
        """Run ``solution/solve.sh``."""
        await self.lay_out_solution(task)
        return await self.exec(["bash", f"{_SOLUTION_FOLDER}/{SOLUTION}"], task.seconds, task.solution_env)

    async def verify(self, task: Task) -> Verdict:
        """Run the task's verifier. Raises what `workspace.verifier.verify` does."""
        return await verify(self.sandbox, task.verification)  # type: ignore[arg-type]  # containers follow


@dataclass(frozen=True)
class TaskWorkspaces:
    """Starts workspaces."""

    pool: SandboxPool
    builder: ImageBuilder | None = None
    images: Mapping[str, TaskImage] = field(default_factory=dict)
    """Of the tasks that run in containers, by their names."""

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[TaskWorkspace]:
        """Start a workspace. Raises ConfigError if files cannot be laid out, SandboxError, ToolFault."""
        image = self.images.get(task.name)
        if image is None:
            if task.needs_image:
                raise ConfigError(f"{task.needs_image}; run it in a container with --backend podman or docker")
            session = await started(self.pool, None, task.files)
            try:
                yield TaskWorkspace(session)
            finally:
                await session.close()
        else:
            assert self.builder is not None
            environment = task.environment
            settings = ContainerSettings(
                self.builder.engine.command,
                image.name,
                cpus=min(environment.cpus or 1.0, os.cpu_count() or 1),
                writable=True,
                folders=(_SOLUTION_FOLDER,),
            )
            limits = SessionLimits(
                wall_seconds=task.seconds,
                memory_bytes=(environment.memory_mb or environment.memory or _DEFAULT_MEMORY_MB) << 20,
                processes=_PROCESSES,
                disk_bytes=_DISK_BYTES,
            )
            async with Container(settings, limits) as container:
                await _lay_out(container, task.files, image.workdir)
                yield TaskWorkspace(container, image.workdir)


async def _lay_out(sandbox: Session | Container, files: Mapping[str, PackedFile], folder: str) -> None:
    try:
        await lay_out(sandbox, files, folder)
    except OSError as error:
        raise ConfigError(f"files cannot be written to {folder}: {error}") from error
