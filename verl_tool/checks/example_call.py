"""A call as a model would write it, in a given format, made from the examples of the tools."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from verl_tool.formats import Call, Format, loop_formats
from verl_tool.formats.find import find_calls
from verl_tool.protocol import ToolDescription
from verl_tool.servers.tools.typed.example import example_call

_ENDS_THE_TRAJECTORY = "finish"
"""A tool whose answer the model never sees: another one shows more."""


@runtime_checkable
class _WritesArguments(Protocol):
    """A format of named arguments."""

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str: ...


@runtime_checkable
class _WritesText(Protocol):
    """A format of one text."""

    def write(self, name: str, payload: str) -> str: ...


@dataclass(frozen=True)
class ExampleCall:
    text: str
    """The turn up to the end of the call, or of the stop string behind it."""
    tool: str
    format: Format

    @property
    def found(self) -> list[Call]:
        """The calls that the format finds in it."""
        return self.format.find_calls(self.text)


def example_of(fmt: Format, tools: Sequence[ToolDescription], stops: Collection[str] = ()) -> ExampleCall | None:
    """A call of the first of `tools` in `fmt`: an example of its own, or one that the format writes.

    `stops`: the stop strings of actions, of which a model writes one behind a call that it does not end by one.
    None if neither gives a call: a format need not be able to write.
    """
    ordered = sorted(tools, key=lambda tool: tool.name == _ENDS_THE_TRAJECTORY)
    for tool in ordered:
        for text in _candidates(fmt, tool):
            if fmt.find_calls(text):
                return ExampleCall(_with_stop(text, fmt, stops), tool.name, fmt)
    return None


def _candidates(fmt: Format, tool: ToolDescription) -> list[str]:
    texts, call = list(tool.example_actions), _read(tool)
    if call is None:
        return texts
    if isinstance(fmt, _WritesArguments):
        texts.append(fmt.write_call(tool.name, _arguments(call, tool)))
    if isinstance(fmt, _WritesText):
        texts.append(fmt.write(tool.name, call.input))
    usage = fmt.usage([tool])
    return [*texts, *(usage[call.start : call.end] for call in fmt.find_calls(usage))]


def _read(tool: ToolDescription) -> Call | None:
    """The call in one of the tool's examples, or in one made from its schema: with arguments, if there is such."""
    formats = loop_formats(None, [tool])
    made = [example_call(tool.name, tool.parameters)] if "properties" in tool.parameters else []
    calls = [call for text in (*tool.example_actions, *made) for call in find_calls(text, formats)]
    return next((call for call in calls if call.arguments), None) or next(iter(calls), None)


def _arguments(call: Call, tool: ToolDescription) -> Mapping[str, Any]:
    if call.arguments is not None:
        return call.arguments
    return dict.fromkeys(list(tool.parameters.get("properties", {}))[:1], call.input)


def _with_stop(text: str, fmt: Format, stops: Collection[str]) -> str:
    behind = next((stop for stop in fmt.stop if stop in stops), None)
    if behind is None or any(stop in text for stop in stops):
        return text
    longer = f"{text.rstrip()}\n{behind}"
    return longer if len(fmt.find_calls(longer)) == len(fmt.find_calls(text)) else text
