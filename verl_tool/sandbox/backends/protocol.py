"""Interfaces of back ends: `Sandbox` for all, and `WorkspaceSandbox` for tools with state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from verl_tool.errors import SandboxError, ToolFault, VerlToolError
from verl_tool.protocol import FaultKind
from verl_tool.sandbox.result import CellResult, RunResult
from verl_tool.sandbox.worker import RunStatus

if TYPE_CHECKING:
    from verl_tool.sandbox.limits import SessionLimits
    from verl_tool.sandbox.session.command_relay import RequestFolder

NOTHING: Mapping[str, str] = MappingProxyType({})


def unusable(words: str, pristine: bool, retryable: bool = False) -> VerlToolError:
    """Return the error for a program that a sandbox needs and that does not run there: SandboxError, or ToolFault
    ``tool_crashed`` unless it was `WorkspaceSandbox.pristine`, since a program may have brought it about."""
    if pristine:
        return SandboxError(words, retryable=retryable)
    return ToolFault(FaultKind.TOOL_CRASHED, words, retryable=False)


class Sandbox(Protocol):
    """Programs and files of one trajectory, isolated from the machine and without a network.

    Calls run one after the other, each with a deadline. They raise ToolFault ``state_lost`` after the sandbox has
    ended, and SandboxError if it fails. Failures of a program are reported in its result.
    """

    async def start(self) -> None:
        """Start the sandbox. Raises ToolFault ``overloaded``, SandboxError."""

    async def stop(self) -> None:
        """End all processes and remove the files. May be called repeatedly."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: str | bytes = "",
        wall_seconds: float | None = None,
        env: Mapping[str, str] = NOTHING,
        cwd: str = ".",
    ) -> RunResult:
        """Run a list of arguments, or a line for ``bash -c``. A relative `cwd` is relative to the work folder."""

    async def read_file(self, path: str) -> bytes:
        """Read a file. A relative path is relative to the work folder. Raises OSError like `open`."""

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file, and make the folders above it. Raises OSError like `open`."""

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file, or the content of a folder, from this machine to `target`. Raises OSError."""

    async def download(self, source: str, target: Path) -> None:
        """Copy a file, or the content of a folder, to `target` on this machine.

        Never writes outside `target`. Links to outside and special files raise OSError.
        """


class Program(Protocol):
    """A program in progress."""

    @property
    def running(self) -> bool:
        """Whether it has not ended."""

    def kill(self) -> None:
        """End it with all processes that it started. Does not wait."""

    async def wait(self) -> RunStatus:
        """Wait until it has ended. Raises SandboxError if the sandbox failed."""


class WorkspaceSandbox(Sandbox, Protocol):
    """A sandbox for tools that keep state between calls."""

    limits: SessionLimits
    pristine: bool
    """Whether what it lacks cannot be the doing of a program: in a container, none has run; in a session, none can."""
    work_directory: str
    """Where programs start, and relative paths begin."""

    async def run(
        self,
        code: str,
        *,
        stdin: str | bytes = "",
        interactive: bool = False,
        wall_seconds: float | None = None,
        counted: bool = True,
    ) -> CellResult:
        """Run a cell of Python in the state that earlier cells left. See `Session.run`."""

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        streams: tuple[int, int, int],
        env: Mapping[str, str] = NOTHING,
        cwd: str = ".",
        terminal: bool = False,
    ) -> Program:
        """Start a program without waiting for its end. See `Session.spawn`."""

    async def fork(self) -> WorkspaceSandbox:
        """Make a second sandbox with the same Python state and files.

        Raises SandboxError with ``retryable=False`` if it cannot be copied.
        """

    def touch(self) -> None:
        """Record that it is used now."""

    async def end_programs(self) -> None:
        """End its Python state and all programs, and reset the wall time of its calls. Its files remain."""

    def companion(
        self, limits: SessionLimits, folders: Sequence[str] = ()
    ) -> AbstractAsyncContextManager[WorkspaceSandbox]:
        """Start a second sandbox, isolated from this one, for programs that judge the results of this one. folders:
        that its programs find empty, where a container needs to know them."""

    async def copy_files(self, target: Any, wall_seconds: float) -> str:
        """Copy the work folder and /tmp to those of its companion. Returns why not everything was copied.
        Raises SandboxError if it takes longer than `wall_seconds`."""

    def request_folder(self, folder: str) -> RequestFolder:
        """The requests that its programs write to a folder, for `CommandRelay`."""

    def whole(self) -> bool:
        """Return whether its folders are unchanged. Its programs may be able to move them."""
