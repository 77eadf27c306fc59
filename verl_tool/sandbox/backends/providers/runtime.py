"""The Python that runs a container's resident process: this machine's, mounted, so that the image needs none."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ROOT = "/.verl-tool"
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
_OPTIONS = "-I -S -B"
_OWN_PYTHON = f"{_ROOT}/python/bin/{_VERSION}"
_REMOTE = ("DOCKER_HOST", "CONTAINER_HOST")
"""Variables by which a command line reaches an engine that may be on another machine."""
_BEGIN = (
    f"test -r {_OWN_PYTHON} && "
    f"exec {_ROOT}/lib/{{loader}} --library-path {_ROOT}/lib:{_ROOT}/python/lib {_OWN_PYTHON} {_OPTIONS} -c "
    '"$0"; '
)
_IMAGES_OWN = f'exec python3 {_OPTIONS} -c "$0"'
_READ = "import os; exec(os.fdopen(0, 'rb', 0, closefd=False).readline())"
"""Runs the line that it is sent: command lines are read by the programs of the container, and may be printed by one."""


@dataclass(frozen=True)
class Runtime:
    """How the resident process is started."""

    mounts: tuple[tuple[str, str], ...]
    """Paths of this machine, and where they are in the container, read-only."""
    command: tuple[str, ...]
    """Arguments of ``sh``. The process executes the first line of its stdin as Python."""


def runtime() -> Runtime:
    """This machine's Python if the engine is on it, else the image's python3, 3.8 or newer."""
    hosts = [os.environ.get(name, "") for name in _REMOTE]
    if any(host and not host.startswith("unix:") for host in hosts):
        return images_runtime()
    return _local_runtime()


def images_runtime(folders: Sequence[str] = ()) -> Runtime:
    """The image's python3, for containers on other machines. folders: are made first, writable for everybody."""
    made = shlex.join(folders)
    make = f"mkdir -p {made} && chmod 1777 {made} && " if folders else ""
    return Runtime((), ("-c", make + _IMAGES_OWN, _READ))


@cache
def _local_runtime() -> Runtime:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    loader = re.search(r"/\S*/ld-linux\S*\.so\S*", maps)
    libc = re.search(r"/\S*/libc(?:-[\d.]+)?\.so\S*", maps)
    if loader is None or libc is None:  # another libc, which is not known to work beside the image's
        return images_runtime()
    libraries = Path(os.path.realpath(libc[0])).parent
    mounts = (
        (str(libraries), f"{_ROOT}/lib"),
        (f"{sys.base_prefix}/lib", f"{_ROOT}/python/lib"),
        (os.path.realpath(sys.executable), _OWN_PYTHON),
    )
    return Runtime(mounts, ("-c", _BEGIN.format(loader=Path(loader[0]).name) + _IMAGES_OWN, _READ))
