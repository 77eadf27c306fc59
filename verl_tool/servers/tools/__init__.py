"""The tools, one file each, and how ``--tool_type`` finds them.

Importing this package imports no tool. A name is a file of this folder, an installed entry point of the group
``verl_tool.tools``, or the path of a user's own ``.py`` file. A file holds typed tools (functions that `tool`
decorates, or `TrajectoryTools`), or exactly one class that extends `Tool`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from verl_tool.content.parts import AudioPart, ImagePart, encode_image, read_media
from verl_tool.errors import ConfigError
from verl_tool.servers.tool_config import ToolConfig, ToolEntry
from verl_tool.servers.tools.base import CallError, Context, InvalidCall, Tool, ToolOptions, ToolResult
from verl_tool.servers.tools.typed.function_tool import function_tool, mark_of, tool
from verl_tool.servers.tools.typed.trajectory_tools import TrajectoryTools, method_tools
from verl_tool.util.plugin import import_file

__all__ = [
    "AudioPart",
    "CallError",
    "Context",
    "ImagePart",
    "InactiveTool",
    "InvalidCall",
    "Tool",
    "ToolOptions",
    "ToolResult",
    "TrajectoryTools",
    "encode_image",
    "inactive_tools",
    "known_tools",
    "load_tools",
    "read_media",
    "tool",
    "tool_class",
    "tool_classes",
]

ENTRY_POINTS = "verl_tool.tools"
_NO_TOOLS = {"base", "new", "pictures", "typed", "workspace"}
"""What this folder holds besides tools."""
_ENVIRONMENTS = "verl_tool.environments"
_NO_ENVIRONMENTS = {"environment_tool", "episode_check"}
"""Modules of the package of environments that hold none. Its sub-packages hold none either."""


@dataclass(frozen=True)
class InactiveTool:
    """A tool that is installed but does not serve."""

    name: str
    why: str


def load_tools(
    spec: str | Sequence[str], config: ToolConfig | None = None, shared: Mapping[str, object] | None = None
) -> list[Tool]:
    """The tools that `spec` names, separated by commas, in its order; without any, those that `config` enables.

    `shared`: options, such as ``workers``, for every tool that has one of that name. They win over the ``execution``
    and ``security`` sections of `config`, and an entry of its ``tools`` wins over both. No tool is started.

    Raises ConfigError if a name is unknown, stands there twice or is disabled, or if an option is wrong.
    """
    config = config or ToolConfig()
    entries = _entries_by_class(config)
    names = _names(spec) or [entry.name for entry in config.tools if entry.enabled]
    if not names:
        raise ConfigError(f"no tool is named; known: {', '.join(known_tools())}, or the path of a .py file")
    classes = [kind for name in names for kind in tool_classes(name)]
    _reject_twice_or_disabled(classes, entries)
    common = {**config.shared_options(), **(shared or {})}
    return [_made(kind, common, entries.get(kind)) for kind in classes]


def inactive_tools(active: Sequence[Tool], config: ToolConfig | None = None) -> list[InactiveTool]:
    """Every known tool that is not among `active`, and why."""
    serving = {tool.name for tool in active}
    disabled = {kind.name for kind, entry in _entries_by_class(config or ToolConfig()).items() if not entry.enabled}
    inactive = []
    for name in known_tools():
        try:
            if any(kind.name in serving for kind in tool_classes(name)):
                continue
        except ConfigError as error:
            inactive.append(InactiveTool(name, str(error)))
            continue
        inactive.append(InactiveTool(name, "disabled in the tool config" if name in disabled else "not in --tool_type"))
    return inactive


def known_tools() -> list[str]:
    """Names of the built-in tools and of the installed ones, sorted."""
    return sorted({*_built_in(), *(point.name for point in entry_points(group=ENTRY_POINTS))})


def tool_class(name: str) -> type[Tool]:
    """As `tool_classes`, where there is just one. Raises ConfigError."""
    kinds = tool_classes(name)
    if len(kinds) > 1:
        raise ConfigError(f"{name} holds several tools: {', '.join(kind.name for kind in kinds)}; one is wanted here")
    return kinds[0]


def tool_classes(name: str) -> tuple[type[Tool], ...]:
    """The classes of the tools of one name, alias of a built-in tool, or path. Raises ConfigError."""
    if name.endswith(".py"):
        return _tools_in(import_file(Path(name)), name)
    if name in _built_in():
        return _tools_in(_imported(name), name)
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return _from_entry_point(name, point.load())
    aliased = [_tools_in(_imported(other), other) for other in _built_in()]
    found = [kinds for kinds in aliased if any(name in kind.aliases for kind in kinds)]
    if found:
        # Of several, the one that keeps nothing, and the one that is alone in its file.
        return min(found, key=lambda kinds: (kinds[0].stateful, len(kinds)))
    raise ConfigError(f"tool {name!r} is unknown; known: {', '.join(known_tools())}, or the path of a .py file")


def _names(spec: str | Sequence[str]) -> list[str]:
    parts = spec.split(",") if isinstance(spec, str) else spec
    return [part.strip() for part in parts if part.strip()]


def _built_in() -> dict[str, str]:
    """The modules of the tools of this folder, and of environments, by their names; none of them is imported."""
    [environments] = importlib.import_module(_ENVIRONMENTS).__path__
    tools = {module.name: __name__ for module in pkgutil.iter_modules(__path__) if module.name not in _NO_TOOLS}
    others = {
        module.name: _ENVIRONMENTS
        for module in pkgutil.iter_modules([environments])
        if not module.ispkg and module.name not in _NO_ENVIRONMENTS
    }
    return {name: f"{package}.{name}" for name, package in {**tools, **others}.items() if not name.startswith("_")}


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(_built_in()[name])
    except ImportError as error:
        raise ConfigError(f"tool {name} cannot be imported: {error}; install what it needs") from error


def _tools_in(module: ModuleType, origin: str) -> tuple[type[Tool], ...]:
    """The tools that a file defines itself. Raises ConfigError if there is none, or more than one class of them."""
    parts = {id(value): value for value in vars(module).values() if inspect.isclass(value) or inspect.isfunction(value)}
    own = [value for value in parts.values() if value.__module__ == module.__name__]
    typed = tuple(kind for value in own for kind in _typed(value))
    classes = [kind for kind in own if _is_tool(kind) and not inspect.isabstract(kind)]
    if len(classes) == 1 and not typed:
        return (_with_name(classes[0], origin),)
    if typed and not classes:
        return typed
    found = ", ".join([kind.__name__ for kind in classes] + [kind.name for kind in typed]) or "none"
    raise ConfigError(
        f"{origin} must hold functions decorated with @tool, TrajectoryTools, or exactly one class that extends Tool "
        f"and has run(); found: {found}"
    )


def _is_tool(value: object) -> TypeGuard[type[Tool]]:
    return inspect.isclass(value) and issubclass(value, Tool)


def _typed(value: Any) -> tuple[type[Tool], ...]:
    """The typed tools that a value of a file is; none if it is something else."""
    if mark_of(value) is not None:
        return (function_tool(value),)
    if not inspect.isclass(value):
        return ()
    if issubclass(value, TrajectoryTools):
        return method_tools(value)  # type: ignore[arg-type] # mypy does not know that classes can be hashed
    if any(mark_of(member) for member in vars(value).values()):
        raise ConfigError(f"{value.__name__} has methods decorated with @tool; let it extend TrajectoryTools")
    return ()


def _from_entry_point(name: str, loaded: object) -> tuple[type[Tool], ...]:
    if _is_tool(loaded):
        return (_with_name(loaded, f"entry point {name!r}"),)
    typed = _typed(loaded)
    if not typed:
        raise ConfigError(
            f"entry point {name!r} of {ENTRY_POINTS} is {loaded!r:.80}; it must be a class that extends Tool, a "
            "function decorated with @tool or a TrajectoryTools"
        )
    return typed


def _with_name(kind: type[Tool], origin: str) -> type[Tool]:
    for attribute in ("name", "description"):
        value = getattr(kind, attribute, None)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{kind.__name__} in {origin} has {attribute}={value!r}; give it a text")
    return kind


def _entries_by_class(config: ToolConfig) -> dict[type[Tool], ToolEntry]:
    """The entries of ``tools``, each checked against the tools that it is for (all of a file), active or not."""
    entries: dict[type[Tool], ToolEntry] = {}
    for entry in config.tools:
        for kind in tool_classes(entry.name):
            if kind in entries:
                raise ConfigError(f"tools {entries[kind].name!r} and {entry.name!r} are one tool; give it one entry")
            kind.check_options(entry.options())
            entries[kind] = entry
    return entries


def _reject_twice_or_disabled(classes: Sequence[type[Tool]], entries: Mapping[type[Tool], ToolEntry]) -> None:
    names = [kind.name for kind in classes]
    for kind in classes:
        if names.count(kind.name) > 1:
            raise ConfigError(f"tool {kind.name!r} is named more than once; name it once")
        if kind in entries and not entries[kind].enabled:
            raise ConfigError(
                f"tool {kind.name!r} is named but disabled in the tool config; set enabled or leave it out"
            )


def _made(kind: type[Tool], common: Mapping[str, object], entry: ToolEntry | None) -> Tool:
    known = kind.Options.model_fields
    options = {name: value for name, value in common.items() if name in known}
    own = entry.options() if entry is not None else {}
    return kind(**{**options, **own})
