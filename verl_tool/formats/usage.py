"""Write the system-prompt paragraph for formats that are best explained by an example."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl_tool.formats.base import Format
from verl_tool.protocol import ToolDescription


def usage_by_example(
    fmt: Format, tools: Sequence[ToolDescription], write_example: Callable[[ToolDescription], str]
) -> str:
    """Describe each tool with an example call, and the form of the answer. The example is one of the tool's own if it
    is in this format, else `write_example` writes it."""
    lines = ["You can use these tools. To call one, write the call just as in its example and stop behind it."]
    for tool in tools:
        own = (action for action in tool.example_actions if fmt.find_calls(action))
        example = next(own, None) or write_example(tool)
        lines += ["", f"{tool.name}: {tool.description}", example]
    lines += ["", "The result then stands behind your call, like this:", fmt.render("…").strip(), "Go on from it."]
    return "\n".join(lines)
