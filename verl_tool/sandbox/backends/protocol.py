"""What every back end can do (`Sandbox`), and what tools with state need besides (`WorkspaceSandbox`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.result import CellResult, RunResult
from verl_tool.sandbox.worker import RunStatus

NOTHING: Mapping[str, str] = MappingProxyType({})


class Sandbox(Protocol):
    """Programs and files of one trajectory, apart from the machine and without a network.

    Calls are done one after the other, each with a deadline. They raise ToolFault ``state_lost`` once the sandbox is
    gone, and SandboxError if it fails; what a program brings upon itself is in its result.
    """

    async def start(self) -> None:
        """Make it. Raises ToolFault ``overloaded``, SandboxError."""

    async def stop(self) -> None:
        """End all that runs in it, and remove its files. Doing so twice is no error."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: str | bytes = "",
        wall_seconds: float | None = None,
        env: Mapping[str, str] = NOTHING,
        cwd: str = wire.WORK_DIRECTORY,
    ) -> RunResult:
        """Run a program by its arguments, or a line for ``bash -c``. A relative `cwd` counts from the work folder."""

    async def read_file(self, path: str) -> bytes:
        """A file's content. A relative path counts from the work folder. Raises OSError as `open` does."""

    async def write_file(self, path: str, content: bytes) -> None:
        """Make or replace a file, and the folders above it. Raises OSError as `open` does."""

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file, or what is in a folder, of this machine to `target`. Raises OSError."""

    async def download(self, source: str, target: Path) -> None:
        """Copy a file, or what is in a folder, to `target` on this machine.

        Nothing is written outside `target`, whatever the sandbox's programs have put there: links that lead out and
        special files raise OSError.
        """


class Program(Protocol):
    @property
    def running(self) -> bool:
        """Whether it has not ended."""

    def kill(self) -> None:
        """End it with what it started; `wait` tells when."""

    async def wait(self) -> RunStatus:
        """Until it has ended. Raises SandboxError if the sandbox failed."""


class WorkspaceSandbox(Sandbox, Protocol):
    """A sandbox for tools that keep state between calls."""

    async def run(
        self,
        code: str,
        *,
        stdin: str | bytes = "",
        interactive: bool = False,
        wall_seconds: float | None = None,
        counted: bool = True,
    ) -> CellResult:
        """Run a cell of Python in the state of those before it; see `Session.run`."""

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        streams: tuple[int, int, int],
        env: Mapping[str, str] = NOTHING,
        cwd: str = wire.WORK_DIRECTORY,
        terminal: bool = False,
    ) -> Program:
        """Start a program that goes on running; see `Session.spawn`."""

    async def fork(self) -> WorkspaceSandbox:
        """A second one with the same Python state and files. Raises SandboxError with ``retryable=False`` if it cannot
        be copied."""

    def touch(self) -> None:
        """It is in use now."""
