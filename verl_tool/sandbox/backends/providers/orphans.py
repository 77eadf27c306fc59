"""Containers and images of processes that are gone: removed when the next server starts.

A container ends by itself when the process that started it does. What remains is left by engines that were killed.
"""

from __future__ import annotations

import json
import os
import re
import socket
from functools import cache
from pathlib import Path

from verl_tool.sandbox.backends.engine import ContainerEngine

OWNER_LABEL = "verl-tool-owner"
COMMIT_REPOSITORY = "localhost/verl-tool-commit"
LIST_CONTAINERS = ("ps", "--all", "--filter", f"label={OWNER_LABEL}", "--format", "{{json .}}")
LIST_IMAGES = ("images", "--format", "{{.Tag}}", COMMIT_REPOSITORY)
_SECONDS = 60.0
_STARTED_AT_WORD = 19
"""Of ``/proc/PID/stat``, behind the name: when the process was started."""


def owner() -> str:
    """This process, as no other on this machine is called."""
    return f"{_host()}.{os.getpid()}.{_started(os.getpid())}"


async def remove_orphans(engine: ContainerEngine) -> int:
    """Remove what processes of this machine have left that do not run any more. Returns how many containers and images.

    Raises SandboxError if the command line cannot be run. What cannot be removed stays.
    """
    listed = await engine.run(LIST_CONTAINERS, seconds=_SECONDS)
    containers = [(name, labels.get(OWNER_LABEL, "")) for name, labels in _containers(listed.stdout.decode())]
    listed = await engine.run(LIST_IMAGES, seconds=_SECONDS)
    images = [(f"{COMMIT_REPOSITORY}:{tag}", tag) for tag in _lines(listed.stdout)]
    found = 0
    for remove, names in (("rm", containers), ("rmi", images)):
        for name, owner_name in names:
            if has_ended(owner_name):
                found += 1
                await engine.run([remove, "--force", name], seconds=_SECONDS)
    return found


def _lines(output: bytes) -> list[str]:
    return output.decode(errors="replace").splitlines()


def _containers(listed: str) -> list[tuple[str, dict[str, str]]]:
    """Names and labels of containers: podman prints a list, docker an object in each line."""
    found = json.loads(listed) if listed.startswith("[") else [json.loads(line) for line in listed.splitlines()]
    return [(_name(each["Names"]), _labels(each["Labels"])) for each in found]


def _name(names: str | list[str]) -> str:
    return names if isinstance(names, str) else names[0]


def _labels(labels: str | dict[str, str] | None) -> dict[str, str]:
    return dict(label.partition("=")[::2] for label in labels.split(",")) if isinstance(labels, str) else labels or {}


def has_ended(name: str) -> bool:
    """Whether an `owner` of this machine does not run any more. Behind it there may be more words."""
    parts = name.split(".")
    if len(parts) < 3 or parts[0] != _host():
        return False
    try:
        return _started(int(parts[1])) != int(parts[2])
    except (OSError, ValueError):
        return True


def _started(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(text.rpartition(")")[2].split()[_STARTED_AT_WORD])


@cache
def _host() -> str:
    """This machine since its start, in letters that a tag may have."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
    processes = os.stat("/proc/self/ns/pid").st_ino  # of a pod on the same machine, whose numbers are others
    return f"{re.sub(r'[^a-zA-Z0-9]', '-', socket.gethostname())[:40]}-{boot}-{processes}"
