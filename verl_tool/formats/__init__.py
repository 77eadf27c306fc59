"""Tool-call formats: how a model writes a call and reads an observation. One file a format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from verl_tool.errors import ConfigError
from verl_tool.formats import load
from verl_tool.formats.bare_json import BareJsonFormat
from verl_tool.formats.base import Call, Format
from verl_tool.formats.fenced import FencedFormat
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

_IN_TEXT: tuple[Format, ...] = (FENCED, PYTHON_TAGS, OPENRLHF, TOOL_TAGS, SEARCH_TAGS, HERMES, TRL, BARE_JSON)
_BUILT_IN: tuple[Format, ...] = (*_IN_TEXT, *NATIVE)
BUILT_IN_MARKERS = frozenset(marker for fmt in _BUILT_IN for marker in fmt.markers())
"""Every string that means something in a built-in format."""
claim(*BUILT_IN_MARKERS)

ALL_FORMATS: tuple[Format, ...] = _BUILT_IN
"""The built-in formats. A tool is called by each of them; tags of its own name come on top (`Tool.formats`)."""


def format_by_name(spec: str) -> Format:
    """A format by its name, by ``<name>`` for a tag, by an entry point of the group ``verl_tool.formats``, or by the
    path of a Python file that holds one as ``FORMAT``. Raises ConfigError naming the known ones."""
    return load.load_format(spec, {fmt.name: fmt for fmt in ALL_FORMATS})


def loop_formats(names: Sequence[str] | None, tools: Iterable[ToolDescription] = ()) -> tuple[Format, ...]:
    """The formats in which a loop looks for calls: those of `names`, else the built-in ones and those that `tools` are
    called by: tags, and formats of installed packages. Raises ConfigError for a name that is unknown, for an empty
    list, and for what a server tells and is no tag.

    A server's word has no file imported: a format of a file must be among `names`.
    """
    if names is not None:
        if not names:
            raise ConfigError("formats is empty; name at least one, such as hermes, or leave it out (null)")
        return tuple(dict.fromkeys(map(format_by_name, names)))
    known = {fmt.name for fmt in ALL_FORMATS}
    description = dict.fromkeys(spec for tool in tools for spec in tool.formats if spec not in known)
    loaded = [spec for spec in description if spec.startswith(("<", "[")) or load.is_installed(spec)]
    return (*ALL_FORMATS, *map(format_by_name, loaded))


def rendered_markers(formats: Iterable[Format]) -> frozenset[str]:
    """The strings that an observation in one of `formats` may hold: what opens and closes it, and what closes a call
    that was cut off. Control tokens of models are not among them: their chat templates write those."""
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
    "Call",
    "FencedFormat",
    "Format",
    "HermesFormat",
    "Tag",
    "TagFormat",
    "ToolTagFormat",
    "TrlFormat",
    "claim",
    "escape_markers",
    "format_by_name",
    "guard",
    "loop_formats",
    "rendered_markers",
]
