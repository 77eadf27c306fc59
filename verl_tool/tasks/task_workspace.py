"""A workspace with a task's files: a session of the sandbox, or a container of the task's image."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from verl_tool.errors import ConfigError
from verl_tool.sandbox import SandboxPool, Session, SessionLimits
from verl_tool.sandbox.backends import Container, ContainerSettings, WorkspaceSandbox
from verl_tool.sandbox.backends.image_builder import ImageBuilder
from verl_tool.sandbox.limits import CONTAINER_OPEN_FILES
from verl_tool.servers.tools.workspace.layout import filled, lay_out, started
from verl_tool.servers.tools.workspace.verifier import SHARED_FOLDERS, verify, verify_in_place
from verl_tool.tasks.task import SOLUTION, Task
from verl_tool.tasks.task_images import TaskImage
from verl_tool.verification import Verdict, Verification

_SOLUTION_FOLDER = "/solution"
_DEFAULT_MEMORY_MB = 2048
_PROCESSES, _DISK_BYTES, _MARGIN_SECONDS = 1024, 2 << 30, 60.0
"""Limits of a container. What it writes to its image is not limited."""
_OUTPUT_BYTES, _MAX_DISPLAY_CHARACTERS = 1 << 16, 1000
_ENVIRONMENT = {"DEBIAN_FRONTEND": "noninteractive"}
"""As Harbor gives it to solutions."""


@dataclass(frozen=True)
class TaskWorkspaces:
    """Starts workspaces."""

    pool: SandboxPool
    builder: ImageBuilder | None = None
    images: Mapping[str, TaskImage] = field(default_factory=dict)
    """Images of the tasks that run in containers, by the tasks' names."""
    trust_image: bool = False
    """Of `ContainerSettings`."""
    shared_verifier: bool = False
    """Verifiers run in containers beside what solutions have left running (`verify_in_place`)."""

    def verification(self, task: Task) -> Verification:
        """The verifier of a task, as its user."""
        image = self.images.get(task.name)
        return task.verification if image is None else image.verification_of(task)

    async def verify(self, task: Task, workspace: WorkspaceSandbox) -> Verdict:
        """Run a task's verifier. Raises what `verify` does."""
        if self.shared_verifier and isinstance(workspace, Container):
            return await verify_in_place(workspace, self.verification(task))
        return await verify(workspace, self.verification(task))

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
            limits = SessionLimits(total_wall_seconds=_total_seconds(task))
            workspace = await started(self.pool, limits, task.files)
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
            folders=(_SOLUTION_FOLDER, *(SHARED_FOLDERS if self.shared_verifier else ())),
            allowed_hosts=task.allowed_hosts,
        )
        limits = SessionLimits(
            memory_bytes=(environment.memory_mb or environment.memory or _DEFAULT_MEMORY_MB) << 20,
            processes=_PROCESSES,
            open_files=CONTAINER_OPEN_FILES,
            disk_bytes=_DISK_BYTES,
            total_wall_seconds=_total_seconds(task),
        )
        return settings, limits


def _total_seconds(task: Task) -> float:
    return max(SessionLimits.total_wall_seconds, task.seconds + _MARGIN_SECONDS)


async def lay_out_solution(task: Task, workspace: WorkspaceSandbox) -> None:
    """Write the files of ``solution/`` to ``/solution``. Raises ConfigError."""
    if isinstance(workspace, Session):  # its /solution is a link
        await workspace.exec(f"mkdir -p /box{_SOLUTION_FOLDER}")
    try:
        await lay_out(workspace, task.solution, _SOLUTION_FOLDER)
    except OSError as error:
        raise ConfigError(f"the solution cannot be written to {_SOLUTION_FOLDER}: {error}") from error


async def run_solution(task: Task, workspace: WorkspaceSandbox, *, stays: bool = False) -> str:
    """Run ``solution/solve.sh``. Return how it failed; empty if it did not. stays: what it leaves running in a
    container goes on."""
    await lay_out_solution(task, workspace)
    command, env = f"bash {_SOLUTION_FOLDER}/{SOLUTION}", {**_ENVIRONMENT, **task.solution_env}
    if stays and isinstance(workspace, Container):
        return await _run_and_stay(workspace, command, env, task.seconds)
    result = await workspace.exec(command, wall_seconds=task.seconds, env=env)
    if result.ok:
        return ""
    how = f"exit code {result.exit_code}" if result.exit_code is not None else f"ended by {result.limit_hit}"
    return _describe(how, result.output)


async def _run_and_stay(container: Container, command: str, env: Mapping[str, str], seconds: float) -> str:
    """Run a command as a program that goes on behind its end, since what it started is ended with it."""
    mark = f"exit code of {secrets.token_hex(8)}: "
    script = f"{command} 2>&1; code=$?; echo; echo '{mark}'$code; exec sleep infinity"
    program = await container.spawn_inside(["bash", "-c", script], env)
    output = b""

    async def read() -> None:
        nonlocal output
        while not re.search(rf"\n{mark}\d+\n$".encode(), output) and (data := await program.stdout.read(1 << 16)):
            output = (output + data)[-_OUTPUT_BYTES:]

    try:
        await asyncio.wait_for(read(), seconds)
    except asyncio.TimeoutError:
        return _describe("ended by wall_seconds", output.decode(errors="replace"))
    printed, _, code = output.decode(errors="replace").rstrip().rpartition(f"\n{mark}")
    return "" if code == "0" else _describe(f"exit code {code}", printed)


def _describe(how: str, output: str) -> str:
    return f"solution/{SOLUTION}: {how}: {output[-_MAX_DISPLAY_CHARACTERS:].strip()}"
