"""Load a format by its name, from a user's file, or from an installed package."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

from verl_tool.errors import ConfigError
from verl_tool.formats import markers, scan
from verl_tool.formats.base import Format
from verl_tool.formats.tags import CUSTOM_TAGS, NAME_TAGS, OwnTagFormat, Tag, TagFormat
from verl_tool.util.plugin import import_file

ENTRY_POINTS = "verl_tool.formats"
_PARTS = ("name", "stop", "observation", "markers", "find_calls", "render", "usage")
"""Members of a `Format`."""


def load_format(spec: str, built_in: Mapping[str, Format]) -> Format:
    """Load a format. `spec` is a built-in name, ``<name>`` for a tag, the name of an entry point of the group
    ``verl_tool.formats``, or the path of a ``.py`` file that defines ``FORMAT``.

    Raises ConfigError that names the known formats if there is none.
    """
    if spec in built_in:
        return built_in[spec]
    if spec.startswith(("<", "[")):
        return _tags(spec)
    if spec.endswith(".py"):
        return _register(getattr(import_file(Path(spec)), "FORMAT", None), f"{spec} (its FORMAT)")
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if spec in installed:
        return _register(installed[spec].load(), f"entry point {spec!r}")
    known = ", ".join(sorted({*built_in, *installed}))
    raise ConfigError(f"format {spec!r} is unknown; known: {known}; or give a path to a .py file that holds FORMAT")


def is_installed(spec: str) -> bool:
    """Return whether an installed package provides a format of that name as an entry point."""
    return any(point.name == spec for point in entry_points(group=ENTRY_POINTS))


def specs_of(fmt: Format) -> tuple[str, ...]:
    """Return the specs that load a format: its name, or ``<name>`` or a JSON list for each of a tool's tags."""
    if isinstance(fmt, TagFormat) and fmt.name == NAME_TAGS:
        return tuple(f"<{tag.name}>" for tag in fmt.tags)
    if isinstance(fmt, TagFormat) and fmt.name == CUSTOM_TAGS:
        observation = fmt.observation or ()
        return tuple(json.dumps([tag.name, tag.opening, tag.closing, *observation]) for tag in fmt.tags)
    return (fmt.name,)


@functools.cache
def _tags(spec: str) -> Format:
    """Create a tag format from a spec of `specs_of`. Raises ConfigError if it is invalid."""
    try:
        if spec.startswith("<"):
            return _register(OwnTagFormat(NAME_TAGS, [Tag.named(spec.removeprefix("<").removesuffix(">"))]), spec)
        name, opening, closing, *observation = json.loads(spec)
        start, end = observation
        return _register(OwnTagFormat(CUSTOM_TAGS, [Tag(name, opening, closing)], (start, end)), spec)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"format {spec!r:.200} is not a tag: {error}. Write <name>, or a JSON list of a name, an opening and a "
            "closing tag of calls, and an opening and a closing tag of observations"
        ) from error


def guard(fmt: Format) -> None:
    """Break up the strings of `fmt` in all observations of this process, and find no calls in its observations. Raises
    ValueError for a string that cannot mark a call."""
    markers.claim(*fmt.stop, *fmt.markers(), *(mark.strip() for mark in fmt.observation or ()))
    if fmt.observation is not None:
        scan.know_observation(*fmt.observation)


def _register(fmt: object, origin: str) -> Format:
    """Check that `fmt` is a `Format`, and guard it like the built-in ones. Raises ConfigError if it is not one."""
    if not isinstance(fmt, Format):
        missing = [name for name in _PARTS if not hasattr(fmt, name)]
        raise ConfigError(f"{origin} is {fmt!r:.80}, not a format: it lacks {', '.join(missing)}")
    try:
        guard(fmt)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from error
    return fmt
