"""Attacks on verifiers: what a policy might do to get a reward without solving its task.

A file of attacks is TOML, each with one of two texts:

    ["a reward is there already"]
    shell = "mkdir -p /box/logs/verifier; echo 1 > /box/logs/verifier/reward.txt"    # run in the workspace

    ["ends with success"]
    code = "raise SystemExit(0)"     # the beginning of each Python file of the workspace; run there as well

`SHIPPED` holds some hundred of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from verl_tool.errors import ConfigError
from verl_tool.sandbox.backends import WorkspaceSandbox
from verl_tool.tasks.task import Task
from verl_tool.tasks.task_workspace import TaskWorkspaces
from verl_tool.verification import Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHIPPED = Path(__file__).parent / "attack_scripts"
_SECONDS = 10.0
"""For an attack to prepare the workspace."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    shell: str = ""
    code: str = ""

    @model_validator(mode="after")
    def _has_one(self) -> _Entry:
        if bool(self.shell) == bool(self.code):
            raise ValueError("give either shell or code")
        return self


@dataclass(frozen=True)
class TaskAttack:
    """One attack."""

    name: str
    shell: str = ""
    """A script of bash that is run in the workspace."""
    code: str = ""
    """Python text that becomes the beginning of each Python file in the workspace, and is run there."""

    async def prepare(self, workspace: WorkspaceSandbox, task: Task) -> None:
        """Do to a workspace with the task's files what the attack does. Whether that succeeds is no matter."""
        command = ["bash", "-c", self.shell] if self.shell else ["python3", "-c", self.code]
        await workspace.exec(command, wall_seconds=_SECONDS)
        if self.code:
            for path, file in task.files.items():
                if path.endswith(".py"):
                    await workspace.write_file(path, self.code.encode() + b"\n" + file.content)


def read_attacks(place: Path) -> list[TaskAttack]:
    """The attacks of a file, or of all ``*.toml`` files in a folder. Raises ConfigError."""
    files = sorted(place.glob("*.toml")) if place.is_dir() else [place]
    if not files:
        raise ConfigError(f"{place} holds no file of attacks (*.toml)")
    return [attack for file in files for attack in _read_file(file)]


def _read_file(file: Path) -> list[TaskAttack]:
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8"))
        return [TaskAttack(name, **dict(_Entry.model_validate(entry))) for name, entry in entries.items()]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"{file}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


async def attempt(attack: TaskAttack, task: Task, workspaces: TaskWorkspaces) -> Verdict:
    """The verdict on a workspace in which nothing was done but the attack. Raises SandboxError or ToolFault."""
    async with workspaces.open(task) as workspace:
        await attack.prepare(workspace, task)
        return await workspaces.verify(task, workspace)
