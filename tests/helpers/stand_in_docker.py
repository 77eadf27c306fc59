#!/usr/bin/env python3
"""A stand-in for the command line of docker: ``run``, ``image inspect``, ``pull`` and ``rm`` over local folders and
processes. It needs root.

A container is a folder below ``$DOCKER_STAND_IN`` with its in-memory folders. Its processes run in a bubblewrap with
these and a read-only root. Limits are recorded and not enforced, but
for a number of processes. Uses the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ.get("DOCKER_STAND_IN", "/nowhere"))
MARK = "STAND_IN_CONTAINER"
_MAX_PROCESSES = 200
_ONE_WORD = {"--force", "--rm", "--init", "--interactive", "--read-only", "--tty"}
_HIDDEN = {"proc", "dev", "tmp", "box", "sys", "run"}


def main(arguments: list[str]) -> int:
    """Run one command with docker's exit code."""
    if arguments[0] in ("image", "pull"):
        return _describe(arguments[-1])
    if arguments[0] in ("ps", "images"):
        return 0
    command, options, words = arguments[0], *_parsed(arguments[1:])
    if command == "run":
        return _run(options, words)
    assert command == "rm"
    remove(STATE / words[0])
    return 0


def _describe(image: str) -> int:
    """The user of an image, which is root."""
    if image.rpartition("/")[2] == "missing":
        print("Error response from daemon: pull access denied for missing", file=sys.stderr)
        return 1
    print("\n")
    return 0


def _parsed(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    options: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("--"):
        name = arguments.pop(0)
        options.setdefault(name, []).append("" if name in _ONE_WORD else arguments.pop(0))
    return options, arguments


def _run(options: dict[str, list[str]], words: list[str]) -> int:
    [name], image, command = options["--name"], words[0], [*options["--entrypoint"], *words[1:]]
    if image == "broken":
        print("Error: OCI runtime error: no memory", file=sys.stderr)
        return 126
    (STATE / name).mkdir()
    (STATE / name / "options.json").write_text(json.dumps(options))
    try:
        hidden = ["/usr/bin/python3"] if image == "no-python" else []
        words = confined(STATE / name, command, options, hidden)
        # Those of all containers count, for they share a user; a fork bomb must find an end.
        resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_PROCESSES, _MAX_PROCESSES))
        return subprocess.run(words, env=_environment(name, image), check=False).returncode
    finally:
        remove(STATE / name)


def _environment(name: str, image: str) -> dict[str, str]:
    path = "/usr/bin:/bin" if image == "no-python" else os.environ["PATH"]
    return {"PATH": path, "HOME": "/root", MARK: name}


def confined(state: Path, command: list[str], options: dict[str, list[str]], hidden: list[str]) -> list[str]:
    """Words that run a command in a container. state: its folder; options: of ``docker run``."""
    words = ["bwrap", "--die-with-parent", "--unshare-net", "--unshare-ipc", "--unshare-pid", "--cap-drop", "ALL"]
    words += [word for each in options["--cap-add"] for word in ("--cap-add", f"CAP_{each}")]
    for entry in os.scandir("/"):
        if entry.is_symlink():
            words += ["--symlink", os.readlink(entry.path), entry.path]
        elif entry.is_dir() and entry.name not in _HIDDEN:
            words += ["--ro-bind", entry.path, entry.path]
    words += ["--dev", "/dev", "--proc", "/proc", "--dir", "/box"]
    for each in ("/dev/shm:", *options["--tmpfs"]):
        inside = each.partition(":")[0]
        outside = state / inside.strip("/").replace("/", "-")
        outside.mkdir(exist_ok=True)
        outside.chmod(0o1777)
        words += ["--bind", str(outside), inside]
    for each in options.get("--volume", ()):
        outside_path, inside, _ = each.split(":")
        for folder in reversed(Path(inside).parents[:-1]):
            words += ["--perms", "0755", "--dir", str(folder)]
        words += ["--ro-bind", outside_path, inside]
    for path in hidden:
        words += ["--ro-bind", "/dev/null", path]
    return [*words, "--chdir", *options["--workdir"], *command]


def remove(state: Path) -> None:
    """Kill its processes and remove its folder."""
    own = os.getpid()
    wanted = f"{MARK}={state.name}".encode()
    for _ in range(3):
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(folder.name) != own and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
    shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
