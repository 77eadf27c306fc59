"""How well a run can be shut in on this machine."""

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
    """How much stands between a run and the host; more is stronger."""

    none = 0
    """Limits per process and an empty environment, nothing else: the code can read and write what the server can."""
    full = 1
    """Namespaces, a read-only root without the host's files, no network, no privileges, a seccomp filter, limits."""

    @classmethod
    def parse(cls, value: Level | str) -> Level:
        """A level by its name. Raises ConfigError if there is none."""
        if isinstance(value, Level):
            return value
        if value not in cls.__members__:
            raise ConfigError(f"isolation level {value!r} is unknown; known: {', '.join(cls.__members__)}")
        return cls[value]


@dataclass(frozen=True)
class Isolation:
    """A level and the means that give it."""

    level: Level
    as_root: bool = False
    """Real root makes the namespaces, and every run has a uid of its own; else user namespaces do."""
    server_filter: bytes = b""
    """The seccomp filter of a forkserver, which its runs inherit: free for them. Without privileges of their own, they
    cannot use what it leaves to the forkserver."""
    run_filter: bytes = b""
    """The filter that each run installs, where it would otherwise keep a use for what the forkserver needs."""
    bwrap: str = ""
    missing: str = ""
    """Why no stronger level is in force."""

    def describe(self) -> str:
        if self.level is Level.none:
            because = f" ({self.missing})" if self.missing else ""
            return f"none: user code runs unconfined, with limits per process and an empty environment{because}"
        means = "real root, one uid per run" if self.as_root else "user namespaces"
        return f"full: bubblewrap, pid and mount namespaces per run, no network, seccomp, limits ({means})"


def strongest() -> Isolation:
    """The strongest isolation that works here, tried out rather than guessed."""
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
    """`found`, if it is at least `required`. Raises IsolationError that says what is missing and what accepts less."""
    if found.level < required:
        raise IsolationError(
            f"isolation level '{required.name}' was asked for, but this machine gives only '{found.level.name}': "
            f"{found.missing}. To accept less, pass required_level='{found.level.name}' "
            f"(server: --isolation {found.level.name}); user code then runs with the server's own rights"
        )
    return found


@lru_cache(maxsize=4)
def _try_namespaces(bwrap: str, as_root: bool) -> str:
    """Make what a forkserver needs, around a program that does nothing; '' if that works, else the complaint."""
    command = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if not as_root:
        command += ["--unshare-user", "--uid", "0", "--gid", "0"]
    command += ["--cap-add", "ALL", "--ro-bind", "/", "/", "--proc", "/proc", "--", shutil.which("true") or "/bin/true"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PROBE_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip() or f"exit {done.returncode}"
