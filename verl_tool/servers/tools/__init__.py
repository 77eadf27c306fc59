"""The tools, one file each, and how ``--tool_type`` finds them.

Importing this package imports no tool. A name is a file of this folder, an installed entry point of the group
``verl_tool.tools``, or the path of a user's own ``.py`` file, which holds exactly one `Tool`.
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

from verl_tool.errors import ConfigError
from verl_tool.plugin import import_file
from verl_tool.servers.tool_config import ToolConfig, ToolEntry
from verl_tool.servers.tools.base import Tool

ENTRY_POINTS = "verl_tool.tools"


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
    classes = [tool_class(name) for name in names]
    _refuse_twice_or_disabled(classes, entries)
    common = {**config.shared_options(), **(shared or {})}
    return [_made(kind, common, entries.get(kind)) for kind in classes]


def inactive_tools(active: Sequence[Tool], config: ToolConfig | None = None) -> list[InactiveTool]:
    """Every known tool that is not among `active`, and why."""
    serving = {tool.name for tool in active}
    disabled = {kind.name for kind, entry in _entries_by_class(config or ToolConfig()).items() if not entry.enabled}
    inactive = []
    for name in known_tools():
        if name in serving:
            continue
        try:
            tool_class(name)
        except ConfigError as error:
            inactive.append(InactiveTool(name, str(error)))
            continue
        inactive.append(InactiveTool(name, "disabled in the tool config" if name in disabled else "not in --tool_type"))
    return inactive


def known_tools() -> list[str]:
    """Names of the built-in tools and of the installed ones, sorted."""
    return sorted({*_built_in(), *(point.name for point in entry_points(group=ENTRY_POINTS))})


def tool_class(name: str) -> type[Tool]:
    """The class of one tool, by name, alias of a built-in tool, or path. Raises ConfigError."""
    if name.endswith(".py"):
        return _only_tool(import_file(Path(name)), name)
    if name in _built_in():
        return _only_tool(_imported(name), name)
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return _from_entry_point(name, point.load())
    for kind in (_only_tool(_imported(other), other) for other in _built_in()):
        if name in kind.aliases:
            return kind
    raise ConfigError(f"tool {name!r} is unknown; known: {', '.join(known_tools())}, or the path of a .py file")


def _names(spec: str | Sequence[str]) -> list[str]:
    parts = spec.split(",") if isinstance(spec, str) else spec
    return [part.strip() for part in parts if part.strip()]


def _built_in() -> list[str]:
    """Names of the files of this folder that hold tools; nothing is imported."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return [name for name in names if name != "base" and not name.startswith("_")]


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise ConfigError(f"tool {name} cannot be imported: {error}; install what it needs") from error


def _only_tool(module: ModuleType, origin: str) -> type[Tool]:
    """The one `Tool` that a file defines itself. Raises ConfigError if there is none or more than one."""
    own = [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Tool) and kind.__module__ == module.__name__ and not inspect.isabstract(kind)
    ]
    if len(own) != 1:
        found = ", ".join(kind.__name__ for kind in own) or "none"
        raise ConfigError(f"{origin} must hold exactly one class that extends Tool and has run(); found: {found}")
    return _with_name(own[0], origin)


def _from_entry_point(name: str, loaded: object) -> type[Tool]:
    if not (inspect.isclass(loaded) and issubclass(loaded, Tool)):
        raise ConfigError(
            f"entry point {name!r} of {ENTRY_POINTS} is {loaded!r:.80}; it must be a class that extends Tool"
        )
    return _with_name(loaded, f"entry point {name!r}")


def _with_name(kind: type[Tool], origin: str) -> type[Tool]:
    for attribute in ("name", "description"):
        value = getattr(kind, attribute, None)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{kind.__name__} in {origin} has {attribute}={value!r}; give it a text")
    return kind


def _entries_by_class(config: ToolConfig) -> dict[type[Tool], ToolEntry]:
    """The entries of ``tools``, each checked against the tool that it is for, active or not."""
    entries: dict[type[Tool], ToolEntry] = {}
    for entry in config.tools:
        kind = tool_class(entry.name)
        if kind in entries:
            raise ConfigError(f"tools {entries[kind].name!r} and {entry.name!r} are one tool; give it one entry")
        kind.check_options(entry.options())
        entries[kind] = entry
    return entries


def _refuse_twice_or_disabled(classes: Sequence[type[Tool]], entries: Mapping[type[Tool], ToolEntry]) -> None:
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
