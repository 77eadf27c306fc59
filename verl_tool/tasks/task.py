"""A task in Harbor's layout (https://www.harborframework.com/docs/tasks), read from its folder.

    my-task/
      task.toml            verifier.timeout_sec, verifier.env, agent.timeout_sec, solution.env, metadata
      instruction.md       what the model is asked
      environment/         files of the workspace, and a Dockerfile that says where they go
      tests/test.sh        the verifier; it writes /logs/verifier/reward.txt or reward.json
      solution/solve.sh    a way to the reward 1, for the check

A key that would change what a task means and that is not followed here is refused by its name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_tool.content.packed_files import PackedFile, pack, pack_files, unpack
from verl_tool.errors import ConfigError
from verl_tool.tasks.environment import workspace_files
from verl_tool.verification import Verification, read_verification

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG, INSTRUCTION, TEST, SOLUTION = "task.toml", "instruction.md", "test.sh", "solve.sh"
_SECONDS = 600.0
"""Harbor's default of both deadlines."""
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "": ("version", "schema_version", "source", "task", "metadata", "verifier", "agent", "solution", "environment"),
    "verifier": ("timeout_sec", "env"),
    "agent": ("timeout_sec",),
    "solution": ("env",),
    "environment": (
        *("build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb", "memory", "storage", "gpus"),
        "allow_internet",
    ),
}
"""The tables of ``task.toml`` and their keys. Those of an image and its machine say what the task needs elsewhere: the
limits of the tool server hold here, and there is no network."""


@dataclass(frozen=True)
class Task:
    """One task."""

    name: str
    """Of its folder."""
    instruction: str
    files: dict[str, PackedFile]
    """In the workspace at the beginning."""
    verification: Verification
    solution: dict[str, PackedFile]
    """With ``solve.sh`` among them; empty if the task has none."""
    solution_env: dict[str, str] = field(default_factory=dict)
    seconds: float = _SECONDS
    """For the solution."""
    metadata: dict[str, Any] = field(default_factory=dict)
    image: str | None = None
    """``environment.docker_image``, which only agent programs run in."""

    def packed_files(self) -> str:
        """The files of the workspace as text; empty if there are none. Raises ConfigError."""
        return pack_files(self.files) if self.files else ""


def task_folders(folder: Path) -> list[Path]:
    """`folder` itself if it is a task, else all folders in it, which must be tasks. Raises ConfigError without any."""
    if (folder / CONFIG).is_file():
        return [folder]
    found = sorted(path for path in folder.glob("*") if path.is_dir() and not path.name.startswith((".", "__")))
    if not found:
        raise ConfigError(f"{folder} holds no tasks; a task is a folder with {CONFIG}, {INSTRUCTION} and tests/{TEST}")
    return found


def read_task(folder: Path, *, ignore_build: bool = False) -> Task:
    """The task in `folder`. `ignore_build`: as of `workspace_files`. Raises ConfigError that names the wrong file."""
    try:
        config = _config(folder)
        verifier = config.get("verifier", {})
        provided = {
            "files": pack(_part(folder, "tests", TEST)),
            "timeout_seconds": verifier.get("timeout_sec", _SECONDS),
        }
        verification = read_verification({**provided, "env": _env(verifier, "verifier")}, f"{CONFIG} and tests/")
        instruction = _text(folder / INSTRUCTION).strip()
        if not instruction:
            raise ConfigError(f"{INSTRUCTION} is empty; write what the model is to do")
        context = unpack(pack(folder / "environment")) if (folder / "environment").is_dir() else {}
        solved = (folder / "solution").is_dir()
        return Task(
            name=folder.resolve().name,
            instruction=instruction,
            files=workspace_files(context, ignore_build=ignore_build),
            verification=verification,
            solution=unpack(pack(_part(folder, "solution", SOLUTION))) if solved else {},
            solution_env=_env(config.get("solution", {}), "solution"),
            seconds=_seconds(config.get("agent", {}).get("timeout_sec", _SECONDS), "agent.timeout_sec"),
            metadata=config.get("metadata", {}),
            image=config.get("environment", {}).get("docker_image"),
        )
    except ConfigError as error:
        raise ConfigError(f"task {folder}: {error}") from None


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = tomllib.loads(_text(folder / CONFIG))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{CONFIG} is no TOML: {error}") from None
    for table, known in _KNOWN.items():
        keys = config.get(table, {}) if table else config
        if not isinstance(keys, dict):
            raise ConfigError(f"{CONFIG}: {table} must be a table, as [{table}]")
        unknown = sorted(set(keys) - set(known))
        if unknown:
            at = f"{table}.{unknown[0]}" if table else unknown[0]
            raise ConfigError(f"{CONFIG}: {at} is not supported here; known: {', '.join(known)}")
    environment = config.get("environment", {})
    if environment.get("gpus") or environment.get("os", "linux") != "linux":
        raise ConfigError(f"{CONFIG}: environment.gpus and another environment.os than linux are not supported here")
    return config


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


def _env(table: Mapping[str, Any], name: str) -> dict[str, str]:
    env = table.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise ConfigError(f"{CONFIG}: {name}.env must be a table of texts")
    secret = next((key for key, value in env.items() if "${" in value), None)
    if secret is not None:
        raise ConfigError(f"{CONFIG}: {name}.env.{secret} takes a variable of the host, and none goes into the sandbox")
    return dict(env)


def _seconds(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{CONFIG}: {name} is {value!r}; give a number above 0")
    return float(value)
