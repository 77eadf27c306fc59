#!/usr/bin/env python3
"""A stand-in for the command line of docker: ``run``, ``exec`` and ``rm`` over local folders and processes.

A container is a folder below ``$DOCKER_STAND_IN`` with its in-memory folders. Its processes run in a bubblewrap with
these and a read-only root. Limits are recorded and not enforced. Uses the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import tty
from pathlib import Path

STATE = Path(os.environ["DOCKER_STAND_IN"])
MARK = "STAND_IN_CONTAINER"
_ONE_WORD = {"--force", "--rm", "--init", "--interactive", "--read-only", "--tty"}
_HIDDEN = {"proc", "dev", "tmp", "box", "sys", "run"}


def main(arguments: list[str]) -> int:
    """Run one command with docker's exit code."""
    command, options, words = arguments[0], *_parsed(arguments[1:])
    if command == "run":
        return _run(options, words)
    if command == "exec":
        return _exec(options, words)
    assert command == "rm"
    _remove(words[0])
    return 0


def _parsed(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    options: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("--"):
        name = arguments.pop(0)
        options.setdefault(name, []).append("" if name in _ONE_WORD else arguments.pop(0))
    return options, arguments


def _run(options: dict[str, list[str]], words: list[str]) -> int:
    [name], image, command = options["--name"], words[0], [*options["--entrypoint"], *words[1:]]
    if image == "missing":
        print("Unable to find image 'missing:latest' locally", file=sys.stderr)
        return 125
    for folder in ("work", "tmp", "shm"):
        (STATE / name / folder).mkdir(parents=True)
    (STATE / name / "options.json").write_text(json.dumps(options))
    if image == "no-python":
        (STATE / name / "no-python").touch()
    try:
        return subprocess.run(
            _confined(name, command, "/box/work"), env=_environment(name, options), check=False
        ).returncode
    finally:
        _remove(name)


def _exec(options: dict[str, list[str]], words: list[str]) -> int:
    name, command = words[0], words[1:]
    if not (STATE / name).is_dir():
        print(f"Error response from daemon: No such container: {name}", file=sys.stderr)
        return 1
    if command[0] == "python3" and (STATE / name / "no-python").exists():
        print("OCI runtime exec failed: exec: python3: executable file not found in $PATH", file=sys.stderr)
        return 127
    environment = _environment(name, options)
    [folder] = options["--workdir"]
    if "--tty" not in options:
        os.execvpe("bwrap", _confined(name, command, folder), environment)
    return _on_a_terminal(_confined(name, ["setsid", "--ctty", *command], folder), environment)


def _on_a_terminal(command: list[str], environment: dict[str, str]) -> int:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    with contextlib.suppress(OSError):
        tty.setraw(0, termios.TCSANOW)
        while True:
            ready, _, _ = select.select([0, ours], [], [])
            if ours in ready:
                os.write(1, os.read(ours, 1 << 16))
            if 0 in ready:
                typed = os.read(0, 1 << 16)
                if not typed:
                    break
                os.write(ours, typed)
    os.close(ours)
    return process.wait() & 0xFF


def _environment(name: str, options: dict[str, list[str]]) -> dict[str, str]:
    given = dict(each.split("=", 1) for each in options.get("--env", ()))
    return {"PATH": os.environ["PATH"], "HOME": "/box/work", "TMPDIR": "/tmp", MARK: name, **given}


def _confined(name: str, command: list[str], folder: str) -> list[str]:
    words = ["bwrap", "--die-with-parent", "--unshare-net", "--unshare-ipc"]
    for entry in os.scandir("/"):
        if entry.is_symlink():
            words += ["--symlink", os.readlink(entry.path), entry.path]
        elif entry.is_dir() and entry.name not in _HIDDEN:
            words += ["--ro-bind", entry.path, entry.path]
    words += ["--dev", "/dev", "--ro-bind", "/proc", "/proc", "--dir", "/box"]
    options = json.loads((STATE / name / "options.json").read_text())
    folders = {"/box/work": "work", "/tmp": "tmp", "/dev/shm": "shm"}
    for each in options["--tmpfs"]:
        inside = each.partition(":")[0]
        folders.setdefault(inside, f"tmpfs{inside}")
    for inside, outside in folders.items():
        (STATE / name / outside).mkdir(parents=True, exist_ok=True)
        words += ["--bind", str(STATE / name / outside), inside]
    for each in options.get("--volume", ()):
        outside, inside, _ = each.split(":")
        words += ["--ro-bind", outside, inside]
    return [*words, "--chdir", folder, *command]


def _remove(name: str) -> None:
    """Kill its processes and remove its folder."""
    own = os.getpid()
    wanted = f"{MARK}={name}".encode()
    for _ in range(3):
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(folder.name) != own and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
    shutil.rmtree(STATE / name, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
