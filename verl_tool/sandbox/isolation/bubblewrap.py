"""The command line that starts a forkserver within namespaces and a read-only root (bwrap(1))."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from verl_tool.errors import IsolationError
from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.isolation.interpreter import Interpreter

INSIDE = str(Path(__file__).resolve().parents[1] / "inside")
_INSIDE_AT = "/box-server/inside"
_SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share/zoneinfo")
"""Programs and libraries of the system. Not /usr/local, /usr/share, /usr/src or /etc: nothing there is needed."""
_SYSTEM_LINKS = ("/bin", "/lib", "/lib32", "/lib64", "/sbin")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_OWN_OF_RUNS = ("/tmp", "/dev", "/box", "/proc")
"""Folders that every run has for itself: nothing of the host is found there."""
_MOVED_TO = "/box-server/host"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_START = "import sys; sys.path.insert(0, sys.argv[1]); from inside.{0} import main; main(int(sys.argv[2]))"


def find() -> str | None:
    """The path of bubblewrap, or None if it is not installed."""
    return shutil.which("bwrap")


def place(path: str) -> str:
    """Where a path of the host is found inside: at the same place, unless runs have a folder of their own there, as for
    a virtual environment below /tmp."""
    moved = any(path == own or path.startswith(own + "/") for own in _OWN_OF_RUNS)
    return _MOVED_TO + path if moved else path


def forkserver_command(executable: str, inside: str, channel_fd: int) -> list[str]:
    """Start the forkserver whose code is the package at `inside`."""
    return _start(executable, "forkserver", inside, channel_fd)


def _start(executable: str, module: str, inside: str, fd: int) -> list[str]:
    return [executable, "-I", "-c", _START.format(module), os.path.dirname(inside), str(fd)]


def isolated_command(bwrap: str, interpreter: Interpreter, channel_fd: int, as_root: bool) -> list[str]:
    """Start the forkserver with namespaces of its own and a read-only view of what Python needs.

    `as_root`: real root makes the namespaces; else a user namespace does, in which the caller appears as root.
    Raises IsolationError if the interpreter itself (not just a virtual environment of it) lives where runs have their
    own folders.
    """
    inner = forkserver_command(place(interpreter.executable), _INSIDE_AT, channel_fd)
    return [*_isolated(bwrap, interpreter, as_root, ()), *inner]


def service_command(
    bwrap: str,
    interpreter: Interpreter,
    config_fd: int,
    as_root: bool,
    readable: Sequence[str],
    files: Mapping[str, int],
) -> list[str]:
    """As `isolated_command`, for one program that goes on running (`inside.service`); `readable`: what else of the
    host it may read, at `place` of each path; `files`: the descriptors that the contents of further read-only files
    are read from, by path, unless `readable` has something at the same path."""
    inner = _start(place(interpreter.executable), "service", _INSIDE_AT, config_fd)
    return [*_isolated(bwrap, interpreter, as_root, readable, files), *inner]


def _isolated(
    bwrap: str, interpreter: Interpreter, as_root: bool, readable: Sequence[str], files: Mapping[str, int] | None = None
) -> list[str]:
    if place(interpreter.real_executable) != interpreter.real_executable:
        raise IsolationError(
            f"the Python at {interpreter.real_executable} cannot be used in the sandbox: runs have a folder of their "
            f"own in its place ({', '.join(_OWN_OF_RUNS)}); pass interpreter= with one that is installed elsewhere"
        )
    command = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if not as_root:
        command += ["--unshare-user", "--uid", "0", "--gid", "0"]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for capability in _capabilities(as_root):
        command += ["--cap-add", capability]
    command += ["--hostname", "sandbox"]
    read_only = _read_only(interpreter, readable, files or {})
    command += read_only
    command += ["--ro-bind", INSIDE, _INSIDE_AT]
    command += ["--proc", "/proc", "--dir", "/dev"]
    for device in _DEVICES:
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for link, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        command += ["--symlink", target, f"/dev/{link}"]
    command += ["--dir", "/box", "--symlink", "box/tmp", "/tmp", "--symlink", "/box/shm", "/dev/shm"]
    for link, target in wire.LINKS.items():
        if not any(word == link or word.startswith(link + "/") for word in read_only):  # the interpreter is there
            command += ["--symlink", target, link]
    return [*command, "--remount-ro", "/", "--chdir", "/"]


def _capabilities(as_root: bool) -> Iterable[str]:
    """What the forkserver needs: namespaces and mounts, a uid for each run, and to see and end such runs."""
    yield from ("CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE", "CAP_KILL")
    if as_root:
        yield from ("CAP_SETUID", "CAP_SETGID")


def _read_only(interpreter: Interpreter, readable: Sequence[str], files: Mapping[str, int]) -> list[str]:
    options: list[str] = []
    bound: list[str] = []
    made: set[str] = set()

    def make_parents(path: str) -> None:
        # Left to itself bubblewrap makes some that only root may enter, and runs are not root.
        folder = os.path.dirname(path)
        if folder in made or folder == "/" or folder in bound:
            return
        make_parents(folder)
        made.add(folder)
        options.extend(["--perms", "0755", "--dir", folder])

    def bind(path: str) -> None:
        if not any(path == above or path.startswith(above + "/") for above in bound):
            make_parents(place(path))
            options.extend(["--ro-bind", path, place(path)])
            bound.append(path)

    for path, fd in files.items():  # first, so that what is bound later is on top
        make_parents(path)
        options.extend(["--perms", "0444", "--ro-bind-data", str(fd), path])
    for path in _SYSTEM:
        if os.path.isdir(path):
            bind(path)
    for path in _SYSTEM_LINKS:
        if os.path.islink(path):
            options.extend(["--symlink", os.readlink(path), path])
        elif os.path.isdir(path):
            bind(path)
    for path in _SYSTEM_FILES:
        if os.path.exists(path):
            bind(path)
    for path in (*interpreter.readable_paths(), *sorted(readable)):
        bind(path)
    for link in _links_to(interpreter, bound):
        make_parents(place(link))
        options.extend(["--symlink", interpreter.real_executable, place(link)])
    return options


def _links_to(interpreter: Interpreter, bound: list[str]) -> list[str]:
    """Names under which programs look for the interpreter, where the host has them and no folder bound holds them."""
    folder = os.path.dirname(interpreter.executable)
    names = {os.path.basename(interpreter.executable), "python", "python3"}
    links = sorted(os.path.join(folder, name) for name in names)
    return [
        link
        for link in links
        if os.path.exists(link)
        and link != interpreter.real_executable
        and not any(link == above or link.startswith(above + "/") for above in bound)
    ]
