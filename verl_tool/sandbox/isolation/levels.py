"""Levels of isolation, and the detection of the level that this machine supports."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from verl_tool.errors import ConfigError, IsolationError
from verl_tool.sandbox.isolation import bubblewrap, seccomp

_PROBE_SECONDS = 20.0
_ROOT_UID = 0


class Level(IntEnum):
    """Levels of isolation, from weak to strong."""

    none = 0
    """Only limits per process and an empty environment. The code can read and write whatever the server can."""
    full = 1
    """Namespaces, a read-only root without the host's files, no network, no privileges, a seccomp filter, limits."""

    @classmethod
    def parse(cls, value: Level | str) -> Level:
        """Return the level of this name. Raises ConfigError if there is none."""
        if isinstance(value, Level):
            return value
        if value not in cls.__members__:
            raise ConfigError(f"isolation level {value!r} is unknown; known: {', '.join(cls.__members__)}")
        return cls[value]


@dataclass(frozen=True)
class Isolation:
    """A level of isolation, and how it is implemented."""

    level: Level
    as_root: bool = False
    """Whether real root makes the namespaces, and every run has a uid of its own. Otherwise, user namespaces do."""
    server_filter: bytes = b""
    """Seccomp filter of a forkserver, which its runs inherit at no cost. It allows calls that the forkserver needs, and
    that runs cannot use for lack of privileges."""
    run_filter: bytes = b""
    """Seccomp filter that each run installs if it could otherwise use such calls."""
    bwrap: str = ""
    missing: str = ""
    """Reason why no stronger level is used."""

    def describe(self) -> str:
        """Describe the isolation for users."""
        if self.level is Level.none:
            because = f" ({self.missing})" if self.missing else ""
            return f"none: user code runs unconfined, with limits per process and an empty environment{because}"
        means = "real root, one uid per run" if self.as_root else "user namespaces"
        return f"full: bubblewrap, pid and mount namespaces per run, no network, seccomp, limits ({means})"


def strongest() -> Isolation:
    """Return the strongest isolation that works on this machine, as determined by trying."""
    bwrap = bubblewrap.find()
    if bwrap is None:
        return Isolation(Level.none, missing="bubblewrap is not installed; `apt-get install bubblewrap`")
    try:
        strict, outer = seccomp.compile_filter(), seccomp.compile_filter(seccomp.FORKSERVER_NEEDS)
    except (OSError, ImportError, RuntimeError) as error:
        return Isolation(Level.none, missing=f"libseccomp cannot be used ({error}); `apt-get install libseccomp2`")
    as_root = os.geteuid() == _ROOT_UID
    refusal = _try_namespaces(bwrap, as_root)
    if refusal and as_root:
        as_root, refusal = False, _try_namespaces(bwrap, False)
    if refusal:
        return Isolation(Level.none, missing=f"namespaces cannot be made here: {refusal}")
    if as_root:
        return Isolation(Level.full, as_root, server_filter=outer, bwrap=bwrap)
    return Isolation(Level.full, as_root, run_filter=strict, bwrap=bwrap)


def require(found: Isolation, required: Level) -> Isolation:
    """Return `found` if it is at least `required`.

    Raises IsolationError that says what is missing, and which option accepts a lower level.
    """
    if found.level < required:
        raise IsolationError(
            f"isolation level '{required.name}' is required, but this machine supports only '{found.level.name}': "
            f"{found.missing}. To accept less, pass required_level='{found.level.name}' "
            f"(server: --isolation {found.level.name}); user code then runs with the server's own rights"
        )
    return found


@lru_cache(maxsize=4)
def _try_namespaces(bwrap: str, as_root: bool) -> str:
    """Run a trivial program in the namespaces that a forkserver needs. Return the error message, '' on success."""
    command = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if not as_root:
        command += ["--unshare-user", "--uid", "0", "--gid", "0"]
    command += ["--cap-add", "ALL", "--ro-bind", "/", "/", "--proc", "/proc", "--", shutil.which("true") or "/bin/true"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PROBE_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip() or f"exit {done.returncode}"
