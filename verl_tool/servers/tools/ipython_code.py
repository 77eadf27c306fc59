"""Runs the model's Python as cells of one session: what a cell defines, the next one knows.

The value of a last expression is shown, ``await`` is allowed, and so are the common additions of IPython:
``!command``, ``%timeit``, ``%%time``, ``%who``, ``%reset``, ``name?`` and others. A cell that is ended by a limit is
undone, and the observation says so; files that it wrote stay.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from verl_tool.content.parts import ImagePart, MediaPart, read_media
from verl_tool.errors import ContentError
from verl_tool.formats import Call
from verl_tool.sandbox import CellResult
from verl_tool.servers.tools._programs import (
    NO_OUTPUT,
    code_of,
    combine_parts,
    cut_parts,
    ending_of,
    joined,
    metrics_of,
    stdin_of,
    without_addresses,
    written_by,
)
from verl_tool.servers.tools.base import Context, ToolResult
from verl_tool.servers.tools.python_code import PythonCodeTool
from verl_tool.servers.tools.workspace.cells import Cell, read_cell
from verl_tool.servers.tools.workspace.kernel import FIGURE_MARK
from verl_tool.servers.tools.workspace.notebook import Notebook
from verl_tool.servers.tools.workspace.workspace import Workspace, WorkspaceOptions, WorkspaceTool

MAX_FIGURES = 8
"""Of one cell that are shown."""
_LONG_CHARACTERS = 16 << 10
"""A longer cell is read in a thread: one of magics alone takes half a microsecond a character."""
_MARK_OF = FIGURE_MARK % "(%s)" + "\n?"
_MARK = re.compile(_MARK_OF % r"\d{1,5}")


class IPythonCodeOptions(WorkspaceOptions):
    """As of every tool with a workspace, and what becomes of figures."""

    images: bool = False
    """Show the figures that matplotlib draws, as PNGs, to models that read images. Without it the model is told that a
    figure was drawn."""


class IPythonCodeTool(WorkspaceTool):
    """One cell a call, in the Python state of the trajectory's workspace."""

    name = "ipython_code"
    aliases = ("ipython", *PythonCodeTool.aliases)
    description = (
        "Runs Python and returns what it prints and the value of its last expression. Variables, imports and files "
        "stay for your next calls."
    )
    parameters: ClassVar = {
        "type": "object",
        "properties": {
            "code": {"type": "string", "description": "the code of one cell; !command runs a shell command"},
            "stdin": {"type": "string", "description": "what the cell reads from standard input"},
        },
        "required": ["code"],
    }
    example_actions = (
        "```python\n1 + 1\n```",
        "<python>1 + 1</python>",
        "<ipython>1 + 1</ipython>",
        "<PYTHON>1 + 1</PYTHON>",
        "<tool>1 + 1</tool>",
        '<tool_call>\n{"name": "python", "arguments": {"code": "1 + 1"}}\n</tool_call>',
        "<request><python>1 + 1<call>",
    )
    Options = IPythonCodeOptions
    options: IPythonCodeOptions

    @classmethod
    def comparable(cls, observation: str) -> str:
        return without_addresses(observation)

    def join(self, calls: Sequence[Call]) -> list[Call]:
        # A cell magic stands at the beginning of a cell.
        return list(calls) if any(call.input.lstrip().startswith("%%") for call in calls) else joined(calls)

    async def run(self, call: Call, context: Context) -> ToolResult:
        code = code_of(call)
        workspace: Workspace = context.state
        notebook = workspace.part(Notebook)
        cell = await asyncio.to_thread(read_cell, code) if len(code) > _LONG_CHARACTERS else read_cell(code)
        result = await notebook.run(
            cell,
            stdin=stdin_of(call, context),
            wall_seconds=self.options.timeout_seconds,
            pre_import=self._settings.policy.pre_import,
        )
        maximum = MAX_FIGURES if self.options.images else 0
        count, figures = await notebook.figures(maximum) if result.state == "kept" else (0, {})
        parts = self._observation(cell, result, count, await asyncio.to_thread(_images, figures))
        return combine_parts(parts, error=not result.ok, metrics=metrics_of(result))

    def _observation(
        self, cell: Cell, result: CellResult, count: int, images: Mapping[int, ImagePart]
    ) -> list[str | MediaPart]:
        """What the cell wrote, with its figures where it showed them, and those that it left open behind."""
        written = cut_parts(_in_order(written_by(result), images), self.options.max_output_length)
        timed = (
            f"CPU time: {result.cpu_seconds:.3g} s, wall time: {result.wall_seconds:.3g} s"
            if cell.timed and result.limit_hit is None
            else ""
        )
        figures, end = _describe(count, len(images)), ending_of(result, self._limits, "a session")
        ending = "\n".join(part for part in (timed, figures, end, *result.notes) if part)
        if ending and written and isinstance(written[-1], str):
            ending = f"{written.pop()}\n{ending}"
        return [*written, ending] if ending else written or [NO_OUTPUT]


def _images(figures: Mapping[int, bytes]) -> dict[int, ImagePart]:
    """Those that can be shown: the program may have written what it likes."""
    images = {}
    for number, content in figures.items():
        try:
            part = read_media(content)
        except ContentError:
            continue
        if isinstance(part, ImagePart):
            images[number] = part
    return images


def _in_order(written: str, images: Mapping[int, ImagePart]) -> Iterator[str | MediaPart]:
    left, position = dict(images), 0
    while left:  # a program may have written a million marks
        mark = re.search(_MARK_OF % "|".join(map(str, left)), written[position:])
        if mark is None:
            break
        yield _MARK.sub("", written[position : position + mark.start()])
        yield left.pop(int(mark[1]))
        position += mark.end()
    yield _MARK.sub("", written[position:])
    yield from left.values()


def _describe(count: int, shown: int) -> str:
    """What the model reads of the figures that a cell has left."""
    if count == shown:
        return ""
    drawn = "1 figure was drawn" if count == 1 else f"{count} figures were drawn"
    if not shown:
        return f"[{drawn}, and cannot be shown here; print what you want to know of it]"
    return f"[{drawn}; {shown} of them {'is' if shown == 1 else 'are'} shown]"
