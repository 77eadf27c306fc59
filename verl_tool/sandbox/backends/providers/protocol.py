"""What starts containers: anything that runs a process in an image and passes bytes to and from it.

All else is the business of the resident process in the container, which is the same for each provider.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from verl_tool.sandbox.backends.settings import ContainerSettings, ImageSettings
from verl_tool.sandbox.limits import SessionLimits

RESIDENT_CAPABILITIES = ("SETUID", "SETGID", "KILL", "CHOWN")
"""Of the resident process, which becomes the programs' user to start them, and ends them."""
CAPABILITIES_FOR_ROOT = ("SETPCAP", "DAC_OVERRIDE", "FOWNER", "FSETID", "NET_BIND_SERVICE", "SYS_CHROOT")
"""In addition, where the image's files may be changed, for programs that are root."""
OWN_PROCESSES = 8
"""Number of processes that are not the model's: the resident, and a keeper for each program."""


@dataclass(frozen=True)
class ContainerSpec:
    """One container that is to be started."""

    name: str
    """Also by which it is removed."""
    settings: ContainerSettings
    limits: SessionLimits
    folders: tuple[str, ...]
    """In memory, empty, and writable for everybody: ``disk_bytes / 2`` each."""

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Of its first process, which is root."""
        return (*RESIDENT_CAPABILITIES, *(CAPABILITIES_FOR_ROOT if self.settings.writable else ()))


class ByteWriter(Protocol):
    """The stdin of a process."""

    def write(self, data: bytes) -> None:
        """Send soon."""

    async def drain(self) -> None:
        """Wait until it takes more. Raises ConnectionError."""

    def close(self) -> None:
        """End it."""


class PipedProcess(Protocol):
    """The first process of a container. It executes the first line of its stdin as Python."""

    @property
    def stdin(self) -> ByteWriter: ...
    @property
    def stdout(self) -> asyncio.StreamReader: ...
    @property
    def stderr(self) -> asyncio.StreamReader:
        """What it and its provider print."""

    @property
    def lines(self) -> bool:
        """Whether only text passes: frames are then lines of base64."""

    async def wait(self) -> None:
        """Wait until it has ended."""

    async def end(self) -> None:
        """End what connects to it, whether or not it has ended."""


class ContainerProvider(Protocol):
    """Starts containers. Failures raise SandboxError: with ``retryable``, where another try may succeed."""

    name: str
    """For messages."""
    start_seconds: float
    """Time to start a container of an image that was described."""
    commits: bool
    """Whether it has `commit`."""
    same_user: bool
    """Whether all processes of a container are one user: programs can end their container, and nothing else."""

    async def describe(self, image: str) -> ImageSettings:
        """Describe an image. One that is not there is fetched."""

    async def start(self, spec: ContainerSpec) -> PipedProcess:
        """Start a container whose network, but for its loopback device, and file system are cut off from this machine.

        It ends when the pipe to its first process is closed, or a few minutes after this process has ended.
        """

    async def remove(self, name: str) -> None:
        """End a container and remove what is left of it. It may be gone."""

    async def commit(self, name: str) -> str:
        """Make an image of a container as it is, and return its name."""

    async def remove_image(self, image: str) -> None:
        """Remove an image of `commit`."""

    async def remove_orphans(self) -> int:
        """Remove what processes of this machine have left that do not run any more. Returns how many there were."""
