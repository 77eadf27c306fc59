"""The command that starts chromium, confined by bubblewrap: no network, no files of the host, no root."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from verl_tool.errors import IsolationError, StartError
from verl_tool.sandbox.isolation import bubblewrap
from verl_tool.sandbox.isolation.interpreter import inspect
from verl_tool.sandbox.isolation.levels import Level

PROXY_PORT = 3128
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_REAL = "/usr/lib/chromium/chromium"
"""Behind Debian's script of the same name, which needs more of /etc than chromium does."""
_LAUNCHER = str(Path(__file__).parent / "inside" / "start_chromium.py")
_AT = "/opt/browser"
_LINKS = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
_CONFIGURATION = ("/etc/fonts", "/etc/ld.so.cache", "/etc/alternatives")
_PROBE_SECONDS = 20.0
_UID = "1000"
"""Not root, for whom chromium's own sandbox does not start."""


@dataclass(frozen=True)
class Confinement:
    """How chromium is confined on this machine."""

    level: Level
    bwrap: str = ""
    missing: str = ""
    """Reason why it is not confined."""


def find_chromium(path: Path | None) -> Path:
    """Return the program of chromium. Raises StartError that says how to install it."""
    if path is not None:
        if not path.is_file():
            raise StartError(f"tool browser: option executable is {str(path)!r}, which is no file")
        return path
    if os.path.isfile(_REAL):
        return Path(_REAL)
    found = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if found is None:
        raise StartError(
            "tool browser: there is no chromium; install it (Debian: apt-get install chromium), or give the option "
            "executable"
        )
    return Path(os.path.realpath(found))


def detect_confinement() -> Confinement:
    """Return what works on this machine, as determined by trying."""
    bwrap = bubblewrap.find()
    if bwrap is None:
        return Confinement(Level.none, missing="bubblewrap is not installed; `apt-get install bubblewrap`")
    command = [*_namespaces(bwrap), "--ro-bind", "/", "/", "--proc", "/proc", "--", shutil.which("true") or "true"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PROBE_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Confinement(Level.none, missing=str(error))
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip() or f"exit {done.returncode}"
        return Confinement(Level.none, missing=f"namespaces cannot be made here: {why}")
    return Confinement(Level.full, bwrap)


def require_confinement(required: str) -> Confinement:
    """Return what works here. Raises IsolationError, naming the option that accepts less, if `required` does not."""
    found = detect_confinement()
    if found.level < Level.parse(required):
        raise IsolationError(
            f"tool browser: isolation {required!r} is required, and this machine supports only "
            f"'{found.level.name}': {found.missing}. To accept less, set the option isolation to '{found.level.name}'; "
            "pages then run in a chromium that can read what the server can, and as root without any sandbox"
        )
    return found if Level.parse(required) is Level.full else Confinement(Level.none, missing="isolation is none")


def write_launcher(folder: Path, control: Path, chromium: Path, confinement: Confinement, data_megabytes: int) -> Path:
    """Write the script that a driver starts in place of chromium, and return its path."""
    confined = confinement.level is Level.full
    profile = "/tmp/profile" if confined else str(folder / "profile")
    inner_control = "/run/control" if confined else str(control)
    launcher = f"{_AT}/start_chromium.py" if confined else _LAUNCHER
    python = inspect(sys.executable).real_executable
    limits = [inner_control, str(PROXY_PORT if confined else 0), str(data_megabytes)]
    command = [python, "-I", launcher, *limits, str(chromium)]
    if confined:
        command = [*_confined(confinement.bwrap, control, chromium, profile), "--", *command]
    else:
        command = ["env", "-i", f"HOME={folder}", "PATH=/usr/bin:/bin", f"PROFILE={profile}", *command]
    script = folder / "chromium.sh"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    return script


def _namespaces(bwrap: str) -> list[str]:
    return [bwrap, "--unshare-all", "--unshare-user", "--uid", _UID, "--gid", _UID, "--die-with-parent"]


def _confined(bwrap: str, control: Path, chromium: Path, profile: str) -> list[str]:
    command = [*_namespaces(bwrap), "--hostname", "browser", "--clearenv"]
    command += ["--ro-bind", "/usr", "/usr"]
    for path in _LINKS:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    readable = [*_CONFIGURATION, *inspect(sys.executable).readable_paths()]
    if not chromium.is_relative_to("/usr"):
        readable.append(str(chromium.parent))
    for path in readable:
        if os.path.exists(path) and not path.startswith("/usr/"):
            command += ["--ro-bind", path, path]
    command += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--dir", profile]
    command += ["--ro-bind", _LAUNCHER, f"{_AT}/start_chromium.py", "--ro-bind", str(control), "/run/control"]
    variables = {"HOME": profile, "PATH": "/usr/bin:/bin", "PROFILE": profile, "LANG": "C.UTF-8"}
    return [*command, *(part for name, value in variables.items() for part in ("--setenv", name, value))]
