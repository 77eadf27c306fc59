"""Tool-call formats: how a model writes a call and reads an observation. One file a format."""

from __future__ import annotations

from verl_tool.formats import load
from verl_tool.formats.bare_json import BareJsonFormat
from verl_tool.formats.base import Call, Format
from verl_tool.formats.fenced import FencedFormat
from verl_tool.formats.hermes import HermesFormat
from verl_tool.formats.load import guard
from verl_tool.formats.markers import claim, escape_markers
from verl_tool.formats.native import DEEPSEEK, GLM, HARMONY, KIMI, LLAMA3, MISTRAL, NATIVE, QWEN3_CODER
from verl_tool.formats.tags import Tag, TagFormat, ToolTagFormat
from verl_tool.formats.trl import TrlFormat

FENCED = FencedFormat()
PYTHON_TAGS = TagFormat("python_tags", [Tag.named("python")])
OPENRLHF = TagFormat("openrlhf", [Tag.named("PYTHON")], ("<PYTHON-OUTPUT>", "</PYTHON-OUTPUT>"))
TOOL_TAGS = ToolTagFormat()
SEARCH_TAGS = TagFormat("search_tags", [Tag.named("search")], ("<information>", "</information>"))
HERMES = HermesFormat()
TRL = TrlFormat()
BARE_JSON = BareJsonFormat()

_BUILT_IN = (FENCED, PYTHON_TAGS, OPENRLHF, TOOL_TAGS, SEARCH_TAGS, HERMES, TRL, BARE_JSON, *NATIVE)
BUILT_IN_MARKERS = frozenset(marker for fmt in _BUILT_IN for marker in fmt.markers())
"""Every string that means something in a built-in format."""
claim(*BUILT_IN_MARKERS)

ALL_FORMATS: tuple[Format, ...] = _BUILT_IN
"""The built-in formats. A tool is called by each of them; tags of its own name come on top (`Tool.formats`)."""


def format_by_name(spec: str) -> Format:
    """A format by its name, by an entry point of the group ``verl_tool.formats``, or by the path of a Python file
    that holds one as ``FORMAT``. Raises ConfigError naming the known ones."""
    return load.load_format(spec, {fmt.name: fmt for fmt in ALL_FORMATS})


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
]
