"""OpenRLHF-style JSON tool configuration: sections ``tools``, ``execution`` and ``security``.

    {
      "tools": [{"name": "python_executor", "enabled": true, "timeout_seconds": 10, "max_output_length": 1000}],
      "execution": {"num_executors": 32, "parallel_execution": true, "max_tools_per_generation": 1},
      "security": {"allowed_modules": ["math", "numpy"], "restricted_functions": ["eval", "open"]}
    }

An entry of ``tools`` may set every option of its tool (`Tool.Options`). ``execution`` and ``security`` set options of
all tools that have them; an entry of ``tools`` wins over them. An unknown key is an error that names the known ones.
Source: the tool-use module of the OpenRLHF fork ag8/orl2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from verl_tool.errors import ConfigError


class ToolEntry(BaseModel):
    """One entry of ``tools``. Every further key is an option of the tool, checked when the tool is made."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    """Name or alias of the tool."""
    enabled: bool = True

    def options(self) -> dict[str, Any]:
        """What to give to the tool's constructor."""
        return dict(self.model_extra or {})


class ExecutionSection(BaseModel):
    """How calls are run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_executors: int | None = Field(default=None, ge=1)
    """Warm sandbox workers of each replica."""
    parallel_execution: bool = True
    """False: one call at a time in each replica."""
    max_tools_per_generation: int | None = Field(default=None, ge=1)
    """Calls of one action that are run; the model is told of those that are not. None: all."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """Wall time of one call."""


class SecuritySection(BaseModel):
    """The policy on top of the sandbox's isolation, enforced inside by import and audit hooks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    allowed_modules: tuple[str, ...] | None = None
    """Top-level modules that a model's code may import; None: every installed one."""
    restricted_functions: tuple[str, ...] = ()
    """Functions that a model's code may not call, such as ``eval`` or ``os.system``."""
    max_memory_mb: int | None = Field(default=None, ge=64)
    """Memory of one call, megabytes of 2**20 bytes."""


class ToolConfig(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tools: tuple[ToolEntry, ...] = ()
    execution: ExecutionSection = ExecutionSection()
    security: SecuritySection = SecuritySection()

    @field_validator("tools", mode="before")
    @classmethod
    def _entries_by_name(cls, value: object) -> object:
        """A mapping from a tool's name to its entry is taken too."""
        if not isinstance(value, Mapping):
            return value
        return [{"name": name, **entry} if isinstance(entry, Mapping) else entry for name, entry in value.items()]

    @field_validator("tools")
    @classmethod
    def _one_entry_a_tool(cls, value: tuple[ToolEntry, ...]) -> tuple[ToolEntry, ...]:
        names = [entry.name for entry in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} stands there more than once; give each tool one entry")
        return value

    @classmethod
    def from_file(cls, path: Path) -> ToolConfig:
        """Read and check a JSON file. Raises ConfigError naming the key at fault and the known ones."""
        try:
            text = path.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"tool config {path} cannot be read: {error}") from error
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"tool config {path} is not JSON: {error}") from error
        return cls.parse(content, f"tool config {path}")

    @classmethod
    def from_cli(cls, from_cli: str) -> ToolConfig:
        """What a command line gives: the path of such a file, or its text, which begins with a brace. Raises
        ConfigError."""
        if not from_cli.lstrip().startswith("{"):
            return cls.from_file(Path(from_cli))
        try:
            content = json.loads(from_cli)
        except ValueError as error:
            raise ConfigError(f"tool config {from_cli:.200} is not JSON: {error}") from error
        return cls.parse(content)

    @classmethod
    def parse(cls, content: object, origin: str = "tool config") -> ToolConfig:
        """Check the content of such a file. Raises ConfigError naming the key at fault and the known ones."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ConfigError(f"{origin}: {_explain(error)}") from error

    def shared_options(self) -> dict[str, Any]:
        """Options that ``execution`` and ``security`` set, for every tool that has one of that name."""
        execution, security = self.execution, self.security
        options: dict[str, Any] = {
            "workers": execution.num_executors,
            "max_concurrent": None if execution.parallel_execution else 1,
            "timeout_seconds": execution.timeout_seconds,
            "allowed_modules": security.allowed_modules,
            "restricted_functions": security.restricted_functions or None,
            "max_memory_mb": security.max_memory_mb,
        }
        return {name: value for name, value in options.items() if value is not None}


def _explain(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        sections: dict[object, type[BaseModel]] = {"execution": ExecutionSection, "security": SecuritySection}
        section = sections.get(problem["loc"][0], ToolConfig)
        return f"unknown key {where!r}; known here: {', '.join(sorted(section.model_fields))}"
    if problem["type"] == "missing":
        return f"key {where!r} is missing"
    return f"{where or 'the content'} is {problem['input']!r:.80}: {problem['msg'].removeprefix('Value error, ')}"
