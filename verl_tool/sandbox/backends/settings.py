"""What a container is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_tool.errors import ConfigError
from verl_tool.sandbox.backends.egress import EgressProxy

LOADER_VARIABLES = ("LD_PRELOAD", "LD_LIBRARY_PATH")
"""Variables that name what is loaded into each program."""


@dataclass(frozen=True)
class ImageSettings:
    """What the Dockerfile of an image says of its programs."""

    user: str
    """``USER``: names or numbers."""
    workdir: str
    """``WORKDIR``."""
    loader: tuple[tuple[str, str], ...] = ()
    """`LOADER_VARIABLES` that it sets."""


@dataclass(frozen=True)
class ContainerSettings:
    command: str
    """The provider (`providers.find_provider`)."""
    image: str
    cpus: float = 1.0
    """Maximum CPU time per second, for all processes together."""
    readable: tuple[str, ...] = ()
    """Files and folders of this machine that are mounted at the same paths, and cannot be changed."""
    writable: bool = False
    """Programs are the image's own user, and may change the image's files."""
    user: str = ""
    """If `writable`: the programs' user, in place of the image's, which providers on other machines do not know."""
    trust_image: bool = False
    """Where programs are root: verifiers run on all that they have changed of the image, and not on a fresh image with
    a copy of the work folder and /tmp. Programs of the image, such as a replaced python3, are then the trajectory's."""
    workdir: str = ""
    """Where its programs start, and relative paths begin. Defaults to that of the image if `writable`, else to a folder
    in memory, ``/box/work``."""
    folders: tuple[str, ...] = ()
    """Further empty folders in memory, that its user may write to."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that its programs reach over a proxy (`egress`); with none, they have no network at all."""
    provider: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the provider's own."""
    max_seconds: float = 86400.0
    """After which it ends, whatever it does."""
    committed: ImageSettings | None = None
    """Of the image from which `image` was made by a commit, and which is removed with the container."""
    original_image: str = ""
    """If `committed`: the image before all commits."""

    def __post_init__(self) -> None:
        if not self.image or self.image.startswith("-"):
            raise ConfigError(f"image is {self.image!r}; give the name of an image that has bash, such as debian:12")
        for path in self.readable:
            if not Path(path).is_absolute() or ":" in path or not Path(path).exists():
                raise ConfigError(f"{path!r} is to be readable in the container; give an absolute path that is there")
        if not self.cpus > 0:
            raise ConfigError(f"cpus is {self.cpus}; it must be above 0")
        if self.user and not self.writable:
            raise ConfigError("user has no effect without writable; leave it out")
        EgressProxy(self.allowed_hosts)

    def fresh(self) -> ContainerSettings:
        """Return these settings with the image as it was before any commit."""
        return replace(self, image=self.original_image or self.image, committed=None, original_image="")
