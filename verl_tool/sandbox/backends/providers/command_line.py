"""Containers by the command line of docker or podman."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
from pathlib import Path

from verl_tool.errors import LateError, SandboxError
from verl_tool.sandbox.backends.engine import NETWORK_PREFIXES, ContainerEngine, end
from verl_tool.sandbox.backends.providers import orphans
from verl_tool.sandbox.backends.providers.protocol import OWN_PROCESSES, ContainerSpec
from verl_tool.sandbox.backends.providers.runtime import runtime
from verl_tool.sandbox.backends.settings import LOADER_VARIABLES, ImageSettings

LABEL = "verl-tool=workspace"
"""Label of every container. ``docker ps --filter label=verl-tool`` lists them."""
_ASK_SECONDS = 60.0
_PULL_SECONDS = 1800.0
_REMOVE_SECONDS = 60.0
"""Podman waits 10 s for a container whose conmon was killed. A removal that is cut off leaves mounts behind."""
_COMMIT_SECONDS = 120.0
_FORMAT = "{{.Config.User}}\n{{.Config.WorkingDir}}\n{{range .Config.Env}}{{println .}}{{end}}"
_MAX_COMPLAINT_CHARACTERS = 500
_MAX_USER_PROCESSES = 1 << 14
"""Maximum for ``--ulimit nproc``. The engine's limit may be lower than that of this process, and cannot be queried."""


class CommandLineProvider:
    """See `ContainerProvider`."""

    start_seconds = 120.0
    commits = True
    same_user = False

    def __init__(self, command: str) -> None:
        """Raises ConfigError if the command line does not exist."""
        self.name = command
        self.engine = ContainerEngine(command)
        self._puller = ContainerEngine(command, NETWORK_PREFIXES)

    async def describe(self, image: str) -> ImageSettings:
        ask = ["image", "inspect", "--format", _FORMAT, image]
        found = await self.engine.run(ask, seconds=_ASK_SECONDS)
        if found.code != 0:
            pulled = await self._puller.run(["pull", "--quiet", image], seconds=_PULL_SECONDS)
            if pulled.code != 0:
                late = f"not within {_PULL_SECONDS:g} s" if pulled.code is None else _end_of(pulled.stderr)
                raise SandboxError(f"{self.name} has no image {image} and cannot pull it: {late}", retryable=True)
            found = await self.engine.run(ask, seconds=_ASK_SECONDS)
        if found.code != 0:
            words = f"{self.name} does not describe the image {image}: {_end_of(found.stderr)}"
            raise SandboxError(words, retryable=True)
        user, workdir, *variables = [line.strip() for line in found.stdout.decode(errors="replace").split("\n")]
        pairs = [variable.partition("=") for variable in variables]
        loader = tuple((name, value) for name, _, value in pairs if name in LOADER_VARIABLES)
        return ImageSettings(user or "0:0", workdir or "/", loader)

    async def start(self, spec: ContainerSpec) -> CommandLineProcess:
        return CommandLineProcess(await self.engine.start(*run_arguments(spec)))

    async def remove(self, name: str) -> None:
        await self.engine.run(["rm", "--force", name], seconds=_REMOVE_SECONDS)

    async def commit(self, name: str) -> str:
        image = f"{orphans.COMMIT_REPOSITORY}:{orphans.owner()}.{secrets.token_hex(8)}"
        ran = await self.engine.run(commit_arguments(name, image), seconds=_COMMIT_SECONDS)
        if ran.code != 0:
            words = _end_of(ran.stderr) if ran.code is not None else f"not within {_COMMIT_SECONDS:g} s"
            kind = LateError if ran.code is None else SandboxError
            raise kind(f"{self.name} commit failed: {words}", retryable=True)
        return image

    async def remove_image(self, image: str) -> None:
        await self.engine.run(["rmi", "--force", image], seconds=_REMOVE_SECONDS)

    async def remove_orphans(self) -> int:
        return await orphans.remove_orphans(self.engine)


class CommandLineProcess:
    """A process of the command line, which ends with its container. See `PipedProcess`."""

    lines = False

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr

    async def wait(self) -> None:
        await self._process.wait()

    async def end(self) -> None:
        await end(self._process)


def commit_arguments(name: str, image: str) -> list[str]:
    """Return the arguments that make an image of a container."""
    return ["commit", "--pause=false", name, image]


def run_arguments(spec: ContainerSpec) -> list[str]:
    """Return the arguments that start a container."""
    limits, half, settings = spec.limits, spec.limits.disk_bytes // 2, spec.settings
    options = f"rw,exec,nosuid,nodev,mode=1777,size={half}"
    # Without it, podman lets a folder in memory begin with the image's files, which may be the trajectory's.
    empty = ",notmpcopyup" if Path(settings.command).name == "podman" else ""
    tmpfs = [f"{path}:{options}{empty if path in settings.folders else ''}" for path in spec.folders]
    python = runtime()
    mounts = [*python.mounts, *((path, path) for path in settings.readable)]
    return [
        # Its first process takes no signal: podman would wait for it when the container is removed.
        *("run", "--interactive", "--rm", "--stop-timeout", "0", "--name", spec.name, "--label", LABEL),
        *("--label", f"{orphans.OWNER_LABEL}={orphans.owner()}"),
        *("--network", "none", "--user", "0:0", *(() if settings.writable else ("--read-only",))),
        *(word for path, there in mounts for word in ("--volume", f"{path}:{there}:ro")),
        *("--cap-drop", "ALL", *(word for name in spec.capabilities for word in ("--cap-add", name))),
        *("--security-opt", "no-new-privileges"),
        *("--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)),
        *("--pids-limit", str(limits.processes + OWN_PROCESSES), "--cpus", f"{min(settings.cpus, _num_cpus()):g}"),
        *("--ulimit", "nofile={0}:{0}".format(_allowed(resource.RLIMIT_NOFILE, limits.open_files))),
        # One --ulimit replaces all defaults of the engine. Without this one, podman requests more processes than
        # are allowed without CAP_SYS_RESOURCE. It counts the processes of all containers, which share a user. The
        # limit of one container is --pids-limit.
        *("--ulimit", "nproc={0}:{0}".format(_allowed(resource.RLIMIT_NPROC, _MAX_USER_PROCESSES))),
        *(word for folder in tmpfs for word in ("--tmpfs", folder)),
        # What is started is root, and programs that were not may have changed a committed image.
        *(word for name in LOADER_VARIABLES if settings.committed for word in ("--env", f"{name}=")),
        *("--workdir", "/", "--entrypoint", "/bin/sh", settings.image, *python.command),
    ]


def _num_cpus() -> int:
    """Return the number of this machine's CPUs: engines reject more."""
    return os.cpu_count() or 1


def _allowed(limit: int, requested: int) -> int:
    """Return what of a resource limit this process can allow."""
    hard = resource.getrlimit(limit)[1]
    return requested if hard == resource.RLIM_INFINITY else min(hard, requested)


def _end_of(complaint: bytes) -> str:
    return complaint.decode(errors="replace").strip()[-_MAX_COMPLAINT_CHARACTERS:]
