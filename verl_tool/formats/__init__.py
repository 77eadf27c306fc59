"""Tool-call formats: how a model writes a call and reads an observation. Each format has its own file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from verl_tool.errors import ConfigError
from verl_tool.formats import load
from verl_tool.formats.bare_json import BareJsonFormat
from verl_tool.formats.base import Call, Format
from verl_tool.formats.fenced import FencedFormat, WebArenaFormat
from verl_tool.formats.hermes import HermesFormat
from verl_tool.formats.load import guard
from verl_tool.formats.markers import claim, escape_markers
from verl_tool.formats.native import DEEPSEEK, GLM, HARMONY, KIMI, LLAMA3, MISTRAL, NATIVE, QWEN3_CODER
from verl_tool.formats.tags import SearchTagFormat, Tag, TagFormat, ToolTagFormat
from verl_tool.formats.trl import TrlFormat
from verl_tool.protocol import ToolDescription

FENCED = FencedFormat()
PYTHON_TAGS = TagFormat("python_tags", [Tag.named("python")])
OPENRLHF = TagFormat("openrlhf", [Tag.named("PYTHON")], ("<PYTHON-OUTPUT>", "</PYTHON-OUTPUT>"))
TOOL_TAGS = ToolTagFormat()
SEARCH_TAGS = SearchTagFormat()
HERMES = HermesFormat()
TRL = TrlFormat()
BARE_JSON = BareJsonFormat()
WEBARENA = WebArenaFormat()

_IN_TEXT: tuple[Format, ...] = (FENCED, PYTHON_TAGS, OPENRLHF, TOOL_TAGS, SEARCH_TAGS, HERMES, TRL, BARE_JSON)
_BUILT_IN: tuple[Format, ...] = (*_IN_TEXT, *NATIVE)
BUILT_IN_MARKERS = frozenset(marker for fmt in _BUILT_IN for marker in fmt.markers())
"""All strings with a meaning in a built-in format."""
claim(*BUILT_IN_MARKERS)

ALL_FORMATS: tuple[Format, ...] = _BUILT_IN
"""The built-in formats. Every tool can be called in all of them, and in those of `Tool.formats`."""
_OF_SOME_TOOLS: tuple[Format, ...] = (WEBARENA,)
"""Formats that a tool has to name: their calls would be ordinary text to others."""


def format_by_name(spec: str) -> Format:
    """Return a format by its name, ``<name>`` for a tag, an entry point of the group ``verl_tool.formats``, or the path
    of a Python file that defines ``FORMAT``. Raises ConfigError that names the known formats."""
    return load.load_format(spec, {fmt.name: fmt for fmt in (*ALL_FORMATS, *_OF_SOME_TOOLS)})


def loop_formats(names: Sequence[str] | None, tools: Iterable[ToolDescription] = ()) -> tuple[Format, ...]:
    """Return the formats in which a loop finds calls: those of `names`, or else the built-in ones and those of `tools`:
    tags, and formats of installed packages. Raises ConfigError for an unknown name, an empty list, or an invalid tag
    from a server.

    Formats in files must be in `names`: a server cannot make the loop import a file.
    """
    if names is not None:
        if not names:
            raise ConfigError("formats is empty; name at least one, such as hermes, or leave it out (null)")
        return tuple(dict.fromkeys(map(format_by_name, names)))
    known = {fmt.name for fmt in ALL_FORMATS}
    specs = dict.fromkeys(spec for tool in tools for spec in tool.formats if spec not in known)
    named = {fmt.name for fmt in _OF_SOME_TOOLS}
    loaded = [spec for spec in specs if spec.startswith(("<", "[")) or spec in named or load.is_installed(spec)]
    return (*ALL_FORMATS, *map(format_by_name, loaded))


def rendered_markers(formats: Iterable[Format]) -> frozenset[str]:
    """Return the strings that an observation in one of `formats` may contain: those that open and close it, and those
    that close a cut-off call. Control tokens of models are not included, because chat templates write them."""
    marks = {mark for fmt in _IN_TEXT for mark in fmt.markers()}
    for fmt in formats:
        if fmt not in NATIVE:
            marks |= {*fmt.markers(), *fmt.stop, *(fmt.observation or ())}
    return frozenset(marks)


__all__ = [
    "ALL_FORMATS",
    "BARE_JSON",
    "BUILT_IN_MARKERS",
    "DEEPSEEK",
    "FENCED",
    "GLM",
    "HARMONY",
    "HERMES",
    "KIMI",
    "LLAMA3",
    "MISTRAL",
    "OPENRLHF",
    "PYTHON_TAGS",
    "QWEN3_CODER",
    "SEARCH_TAGS",
    "TOOL_TAGS",
    "TRL",
    "WEBARENA",
    "Call",
    "FencedFormat",
    "Format",
    "HermesFormat",
    "Tag",
    "TagFormat",
    "ToolTagFormat",
    "TrlFormat",
    "WebArenaFormat",
    "claim",
    "escape_markers",
    "format_by_name",
    "guard",
    "loop_formats",
    "rendered_markers",
]
