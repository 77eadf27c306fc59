"""The system-prompt paragraph of the formats that are best told by an example."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl_tool.formats.base import Format
from verl_tool.protocol import ToolDescription


def usage_by_example(
    fmt: Format, tools: Sequence[ToolDescription], write_example: Callable[[ToolDescription], str]
) -> str:
    """Each tool with one call of it in this format: one of the tool's own examples if it is in the format, else
    what `write_example` gives; and how the answer will look."""
    lines = ["You can use these tools. To call one, write the call just as in its example and stop behind it."]
    for tool in tools:
        own = (action for action in tool.example_actions if fmt.find_calls(action))
        example = next(own, None) or write_example(tool)
        lines += ["", f"{tool.name}: {tool.description}", example]
    lines += ["", "The result then stands behind your call, like this:", fmt.render("…").strip(), "Go on from it."]
    return "\n".join(lines)
