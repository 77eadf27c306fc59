"""Use plain Python functions as the loop's tools, without a server."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_tool.agent_loop.function_arguments import ArgumentsError, CheckedFunction, Function
from verl_tool.content.parts import AudioPart, ImagePart, Part, TextPart, as_parts, reject_too_much, tagged
from verl_tool.errors import ConfigError, ContentError, ToolFault
from verl_tool.formats import ALL_FORMATS, Call, Format
from verl_tool.formats.base import render_parts
from verl_tool.formats.find import find_calls
from verl_tool.protocol import FaultKind, StepResult, ToolDescription

_NOT_TEXT = frozenset({"PIL", "matplotlib", "IPython"})
"""Packages whose objects are images."""
ENDINGS = frozenset({"submit", "finish"})
"""Calls that end a trajectory."""


class FunctionTools:
    """Runs the calls of an action one after the other, each function in a thread.

    `function_arguments` parses the arguments. A coroutine function is awaited. If a function raises, the exception
    becomes the observation, so that the model can learn from it. A call of ``submit`` or ``finish`` ends the
    trajectory. Functions run without a sandbox: use a tool server to run code that a model wrote.
    """

    def __init__(
        self,
        functions: Mapping[str, Function] | Iterable[Function],
        formats: Sequence[Format] = ALL_FORMATS,
        max_chars: int | None = None,
    ) -> None:
        """`functions` maps tool names to functions, or lists functions that keep their names. Outputs are cut at
        `max_chars`. Raises ConfigError if a function's annotations cannot be read.
        """
        self.functions = {name: CheckedFunction(name, function) for name, function in by_name(functions).items()}
        self._formats, self._max_chars = tuple(formats), max_chars

    async def call(
        self,
        trajectory_id: str,
        action: str,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        finish: bool = False,
        is_last_step: bool = False,
    ) -> StepResult:
        if finish:
            return StepResult(trajectory_id)
        calls = find_calls(action, self._formats)
        if not calls:
            return StepResult(trajectory_id, self._formats[0].render(self._no_call()), valid=False)
        visible: list[Part] = []
        valid = True
        for call in calls:
            if call.name in ENDINGS and call.name not in self.functions:
                return _result(trajectory_id, visible, done=True)
            try:
                answer = await self._run(call)
            except ArgumentsError as error:
                answer, valid = [TextPart(str(error))], False
            cut = [TextPart(self._cut(part.text)) if isinstance(part, TextPart) else part for part in answer]
            visible += render_parts(call.format, cut, call)
        return _result(trajectory_id, visible, valid=valid)

    def describe(self) -> list[ToolDescription]:
        """Describe each function for a prompt."""
        return [function.describe() for function in self.functions.values()]

    async def _run(self, call: Call) -> list[Part]:
        """Run one call. Raises ArgumentsError if it cannot be run."""
        if call.error is not None:
            raise ArgumentsError(call.error)
        if call.name not in self.functions:
            raise ArgumentsError(f"Unknown tool {call.name}. Known: {', '.join(self.functions)}.")
        try:
            provided = await asyncio.to_thread(self.functions[call.name].run, call)
            if inspect.isawaitable(provided):
                provided = await provided
            text = str(provided)
        except ArgumentsError:
            raise
        except Exception as error:  # noqa: BLE001 - user code may raise anything, and the model reads the message
            return [TextPart(f"Tool error: {error}")]
        values = provided if isinstance(provided, list | tuple) else (provided,)
        if any(isinstance(value, ImagePart | AudioPart) for value in values):
            return as_parts(value if isinstance(value, ImagePart | AudioPart) else str(value) for value in values)
        for part in values:
            if isinstance(part, bytes) or type(part).__module__.partition(".")[0] in _NOT_TEXT:
                raise ConfigError(
                    f"the tool {call.name!r} answered with a {type(part).__name__}, which no model reads. For a model "
                    "that reads images, return verl_tool.content.parts.encode_image(image) from the function; else "
                    "return text: a caption, the numbers that the image shows, or the name of a file that it was "
                    "saved to"
                )
        return [TextPart(text)]

    def _no_call(self) -> str:
        return f"No tool call was found. Known tools: {', '.join(self.functions)}."

    def _cut(self, text: str) -> str:
        if self._max_chars is None or len(text) <= self._max_chars:
            return text
        return text[: max(0, self._max_chars - 3)] + "..."


def _result(trajectory_id: str, visible: Sequence[Part], *, done: bool = False, valid: bool = True) -> StepResult:
    """Build the result of an action. Raises ToolFault for too many images."""
    try:
        reject_too_much(visible)
    except ContentError as error:
        raise ToolFault(FaultKind.TOOL_CRASHED, str(error), False, trajectory_id) from error
    text, images, audios = tagged(visible)
    return StepResult(trajectory_id, text, done, valid, image=images or None, audio=audios or None)


def by_name(functions: Mapping[str, Function] | Iterable[Function]) -> dict[str, Function]:
    """Map tool names to functions; a function without a given name keeps its own."""
    return dict(functions) if isinstance(functions, Mapping) else {_name(f): f for f in functions}


def _name(function: Function) -> str:
    """Return a function's name, or the class name of any other callable."""
    name: str = getattr(function, "__name__", type(function).__name__)
    return name
