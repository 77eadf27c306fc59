"""A task in Harbor's layout (https://www.harborframework.com/docs/tasks), read from its folder.

    my-task/
      task.toml            timeouts, variables, what the environment needs; see `task_config`
      instruction.md       what the model is asked
      environment/         files of the workspace, and a Dockerfile that says where they go
      tests/test.sh        the verifier; it writes /logs/verifier/reward.txt or reward.json
      solution/solve.sh    a way to the reward 1, for the check

What would change the meaning of a task and is not followed here is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_tool.content.packed_files import PackedFile, pack, pack_files, unpack
from verl_tool.errors import ConfigError
from verl_tool.tasks.environment import (
    DOCKERFILE,
    NeedsImageError,
    check_compose,
    is_compose_file,
    reject_build_steps,
    workspace_files,
)
from verl_tool.tasks.task_config import CONFIG, EnvironmentTable, TaskConfig, parse_config, requested_hosts
from verl_tool.verification import Verification, read_verification

INSTRUCTION, TEST, SOLUTION, MANIFEST = "instruction.md", "test.sh", "solve.sh", "dataset.toml"
_SECONDS = 600.0
"""Harbor's default of the verifier's deadline, and that of a solution here."""
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_SHELL = re.compile(r"#!.*\b(ba|da|)sh\b")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class Task:
    """One task."""

    name: str
    """Of its folder."""
    instruction: str
    files: dict[str, PackedFile]
    """In the workspace at the beginning, in addition to those of the image that the task needs."""
    verification: Verification
    solution: dict[str, PackedFile]
    """With ``solve.sh`` among them; empty if the task has none."""
    solution_env: dict[str, str] = field(default_factory=dict)
    seconds: float = _SECONDS
    """For the solution."""
    metadata: dict[str, Any] = field(default_factory=dict)
    environment: EnvironmentTable = field(default_factory=EnvironmentTable)
    user: str | None = None
    """Who runs in a container of the image; None: the image's own user."""
    verifier_user: str | None = None
    """Who runs the verifier: `user`, or root; None: the image's own user."""
    context: Path | None = None
    """The folder ``environment/``, from which an image is built."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts that its container reaches."""
    needs_image: str = ""
    """Why the task cannot run in the sandbox; empty if it can."""

    @property
    def verifier_hosts(self) -> tuple[str, ...]:
        """Hosts that its verifier reaches."""
        hosts = self.verification.allowed_hosts
        return self.allowed_hosts if hosts is None else hosts

    @property
    def image(self) -> str | None:
        """``environment.docker_image``"""
        return self.environment.docker_image

    def packed_files(self) -> str:
        """The files of the workspace as text; empty if there are none. Raises ConfigError."""
        return pack_files(self.files) if self.files else ""


def task_folders(folder: Path) -> list[Path]:
    """`folder` itself if it is a task, else all folders in it, which must be tasks. Raises ConfigError without any."""
    if (folder / CONFIG).is_file():
        return [folder]
    found = sorted(path for path in folder.glob("*") if path.is_dir() and not path.name.startswith((".", "__")))
    if not found and (folder / MANIFEST).is_file():
        raise ConfigError(
            f"{folder / MANIFEST} names packages of Harbor's registry, and they are not downloaded here; download them "
            "with Harbor, and give the folder of tasks"
        )
    if not found:
        raise ConfigError(f"{folder} holds no tasks; a task is a folder with {CONFIG}, {INSTRUCTION} and tests/{TEST}")
    return found


def read_task(
    folder: Path,
    *,
    ignore_build: bool = False,
    offline: bool = False,
    network: bool = False,
    with_solution: bool = True,
) -> Task:
    """Read the task in `folder`.

    Args:
        folder: with ``task.toml``.
        with_solution: a training needs none.
        ignore_build: as of `workspace_files`.
        offline: a task that requests a network runs without one.
        network: a task runs in a container with the network that it has in Harbor.

    Raises ConfigError that names the wrong file.
    """
    try:
        return _read(folder, ignore_build, offline, network, with_solution)
    except ConfigError as error:
        raise ConfigError(f"task {folder}: {error}") from None


def _read(folder: Path, ignore_build: bool, offline: bool, network: bool, with_solution: bool) -> Task:
    config = parse_config(_text(folder / CONFIG), any_network=offline or network)
    hosts = requested_hosts(config.agent, config) if network else ()
    verifier_hosts = requested_hosts(config.verifier, config) if network else ()
    _check_folder(folder)
    provided = {
        "files": pack(_part(folder, "tests", TEST)),
        "timeout_seconds": config.verifier.timeout_sec or _SECONDS,
        "env": config.verifier.env,
        "allowed_hosts": verifier_hosts if verifier_hosts != hosts else None,
    }
    verification = read_verification(provided, f"{CONFIG} and tests/")
    instruction = strip_canary(_text(folder / INSTRUCTION)).strip()
    if not instruction:
        raise ConfigError(f"{INSTRUCTION} is empty; write what the model is to do")
    context = folder / "environment"
    has_image = config.environment.docker_image is not None
    files, reason = _files_of(context, ignore_build, has_image) if context.is_dir() else ({}, "")
    has_solution = with_solution and (folder / "solution").is_dir()
    reasons = [*_image_reasons(config, context), *([reason] if reason else [])]
    reasons += ["it requests a network"] if hosts or verifier_hosts else []
    return Task(
        name=folder.resolve().name,
        instruction=instruction,
        files={} if reasons and (context / DOCKERFILE).is_file() else files,
        verification=verification,
        solution=unpack(pack(_part(folder, "solution", SOLUTION))) if has_solution else {},
        solution_env=config.solution.env,
        seconds=config.agent.timeout_sec or _SECONDS,
        metadata=config.metadata,
        environment=config.environment,
        user=None if config.agent.user is None else str(config.agent.user),
        verifier_user=None if config.verifier.user is None else str(config.verifier.user),
        context=context.resolve() if context.is_dir() else None,
        allowed_hosts=hosts,
        needs_image="; ".join(reasons),
    )


def _image_reasons(config: TaskConfig, context: Path) -> Iterator[str]:
    """Yield what of the configuration only an image can follow. Raises ConfigError for what nothing can."""
    environment, dockerfile = config.environment, context / DOCKERFILE
    composed = [path for path in context.glob("*") if is_compose_file(path.name)] if context.is_dir() else []
    for path in composed:
        check_compose(path.name, _text(path))
    if composed and not dockerfile.is_file():
        raise ConfigError(f"environment/{composed[0].name} builds a {DOCKERFILE}, and there is none")
    if environment.docker_image and not dockerfile.is_file():
        yield f"environment.docker_image is {environment.docker_image}, and there is no {DOCKERFILE}"
    for key in ("env", "workdir"):
        if getattr(environment, key):
            yield f"environment.{key} is set"
    for part in ("agent", "verifier"):
        if getattr(config, part).user is not None:
            yield f"{part}.user is set"


def _files_of(context: Path, ignore_build: bool, has_image: bool) -> tuple[dict[str, PackedFile], str]:
    """The files of a workspace in the sandbox, and why they need an image instead. has_image: there is one in the place
    of the Dockerfile. Raises ConfigError."""
    dockerfile = context / DOCKERFILE
    try:
        if dockerfile.is_file() and not ignore_build:
            reject_build_steps(_text(dockerfile))
        try:
            files = unpack(pack(context))
        except ConfigError as error:  # an image can have links, and more files than what is packed
            if dockerfile.is_file():
                raise NeedsImageError(f"environment/ cannot be packed: {error}") from None
            raise
        return workspace_files(files, ignore_build=ignore_build), ""
    except ConfigError as error:
        if not has_image and not isinstance(error, NeedsImageError):
            raise
        return {}, str(error)


def _check_folder(folder: Path) -> None:
    """Raise ConfigError for files of Harbor's layout that are not followed."""
    if (folder / "trajectory.json").exists():
        raise ConfigError("trajectory.json is not supported: a trajectory begins with the instruction")
    for part, script in (("tests", TEST), ("solution", SOLUTION)):
        if next((folder / part).rglob(".harborignore"), None) is not None:
            raise ConfigError(f"{part}/.harborignore is not supported; remove it, and the files that it names")
        first = _text(folder / part / script).partition("\n")[0] if (folder / part / script).is_file() else ""
        if first.startswith("#!") and not _SHELL.match(first):
            raise ConfigError(f"{part}/{script} begins with {first!r:.80}; it is run by bash here")
        if (folder / part / script.replace(".sh", ".bat")).exists() and not first:
            raise ConfigError(f"{part}/{script.replace('.sh', '.bat')} is of Windows; tasks run on linux")
    for path in folder.rglob("*"):
        if path.is_file() and path.lstat().st_size < 1024 and path.read_bytes().startswith(_LFS_POINTER):
            raise ConfigError(f"{path.relative_to(folder)} is a pointer of git lfs; fetch the files with git lfs pull")


def strip_canary(text: str) -> str:
    """Remove the lines with a data-provenance marker from the beginning of an instruction, as Harbor does."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines)


def _part(folder: Path, name: str, script: str) -> Path:
    if not (folder / name / script).is_file():
        raise ConfigError(f"there is no {name}/{script}")
    return folder / name


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no {path.name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read: {error}") from None
