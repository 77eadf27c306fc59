"""Plain Python functions as the loop's tools, without a server."""

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
    """Runs the calls of an action one after the other, each function in a thread of its own.

    A function gets its arguments as `function_arguments` reads them from the call; a coroutine function is awaited.
    What it raises is an observation: it is the caller's own code, and the model may learn from it. A call of ``submit``
    or ``finish`` ends the trajectory. There is no sandbox here: use a tool server to run what a model wrote.
    """

    def __init__(
        self,
        functions: Mapping[str, Function] | Iterable[Function],
        formats: Sequence[Format] = ALL_FORMATS,
        max_chars: int | None = None,
    ) -> None:
        """`functions` by the names that the model uses, or by their own. Longer outputs than `max_chars` are cut.

        Raises ConfigError if one has annotations that cannot be read.
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
        """What a prompt tells of each function."""
        return [function.describe() for function in self.functions.values()]

    async def _run(self, call: Call) -> list[Part]:
        """Raises ArgumentsError if the call cannot be run."""
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
        except Exception as error:  # noqa: BLE001 - a function of the user's may raise anything, and the model reads it
            return [TextPart(f"Tool error: {error}")]
        values = provided if isinstance(provided, list | tuple) else (provided,)
        if any(isinstance(value, ImagePart | AudioPart) for value in values):
            return as_parts(value if isinstance(value, ImagePart | AudioPart) else str(value) for value in values)
        for part in values:
            if isinstance(part, bytes) or type(part).__module__.partition(".")[0] in _NOT_TEXT:
                raise ConfigError(
                    f"the tool {call.name!r} answered with a {type(part).__name__}, which no model reads. For one that "
                    "reads images let the function return verl_tool.content.parts.encode_image(image), else return "
                    "what it is to know of it in words, such as the numbers that it shows, a caption, or the name of a "
                    "file that it was saved to"
                )
        return [TextPart(text)]

    def _no_call(self) -> str:
        return f"No tool call was found. Known tools: {', '.join(self.functions)}."

    def _cut(self, text: str) -> str:
        if self._max_chars is None or len(text) <= self._max_chars:
            return text
        return text[: max(0, self._max_chars - 3)] + "..."


def _result(trajectory_id: str, shown: Sequence[Part], *, done: bool = False, valid: bool = True) -> StepResult:
    """Raises ToolFault for too many images."""
    try:
        reject_too_much(shown)
    except ContentError as error:
        raise ToolFault(FaultKind.TOOL_CRASHED, str(error), False, trajectory_id) from error
    text, images, audios = tagged(shown)
    return StepResult(trajectory_id, text, done, valid, image=images or None, audio=audios or None)


def by_name(functions: Mapping[str, Function] | Iterable[Function]) -> dict[str, Function]:
    """The functions by the names that they are given, or by their own."""
    return dict(functions) if isinstance(functions, Mapping) else {_name(f): f for f in functions}


def _name(function: Function) -> str:
    """A function's own name, or the class of an object that can be called."""
    name: str = getattr(function, "__name__", type(function).__name__)
    return name
