"""Turn what a model wrote in a call into the arguments of a Python function.

A JSON call passes arguments by name. The text of any other call is parsed as

- the argument itself, if the function has or requires just one;
- arguments by name, if the function has several and the text is a JSON object with only their names as keys;
- positional arguments, if the function requires several: comma-separated values, each JSON or bare text.

Pydantic converts the values to the types of the function's annotations, or rejects them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError, validate_call

from verl_tool.errors import ConfigError
from verl_tool.formats import Call
from verl_tool.formats.json_call import decode
from verl_tool.protocol import ToolDescription

Function = Callable[..., object]
_TYPES = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True)


class ArgumentsError(ValueError):
    """The arguments do not fit the function. The message is written for the model."""


class CheckedFunction:
    """A function that a model calls by `name`, with its arguments checked."""

    def __init__(self, name: str, function: Function) -> None:
        """`function` may be any callable. Raises ConfigError if its type annotations cannot be read."""
        self.name = name
        self._docstring = inspect.getdoc(function) or ""
        self._run, self._checked = _checked(name, function)
        self._parameters = _parameters_of(function)
        self._named = [p for p in self._parameters if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
        self._required = [p for p in self._named if p.default is Parameter.empty]

    def run(self, call: Call) -> object:
        """Run the function. Raises ArgumentsError, or what the function raises."""
        try:
            return self._call(self._parse_text(call.input) if call.arguments is None else call.arguments)
        except ValidationError as error:
            if error.title != self.name:
                raise  # raised inside the function
            problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
            raise ArgumentsError(f"Wrong arguments for {self.name}{self._describe()}: {'; '.join(problems)}") from error

    def describe(self) -> ToolDescription:
        """Describe the function for a prompt: its name, the first paragraph of its docstring, its argument types."""
        words = " ".join(self._docstring.split("\n\n")[0].split())
        return ToolDescription(
            name=self.name, description=words, parameters=self._schema(), usage="", example_actions=[], stateful=False
        )

    def _call(self, arguments: str | Mapping[str, Any] | Sequence[Any]) -> object:
        if isinstance(arguments, str):
            return self._run(arguments)
        if not isinstance(arguments, Mapping):
            arguments = dict(zip((p.name for p in self._named), arguments, strict=False))
        first = [p.name for p in self._named if p.kind is Parameter.POSITIONAL_ONLY]
        in_order = [arguments[name] for name in first if name in arguments]
        return self._run(*in_order, **{name: value for name, value in arguments.items() if name not in first})

    def _parse_text(self, text: str) -> str | Mapping[str, Any] | Sequence[Any]:
        if not self._parameters:
            if text.strip():
                raise ArgumentsError(f"{self.name}() takes no arguments, and was given {text.strip()!r:.80}")
            return {}
        if not self._named:
            return text
        if len(self._named) > 1 and (named := self._by_name(text)) is not None:
            return named
        if len(self._required) <= 1:
            return {(self._required or self._named)[0].name: text}
        values = _split_values(text)
        if not len(self._required) <= len(values) <= len(self._named):
            raise ArgumentsError(
                f"{self.name}{self._describe()} was given {len(values)} arguments; separate them by commas, or write a "
                "JSON object with their names"
            )
        return values

    def _by_name(self, text: str) -> Mapping[str, Any] | None:
        if not text.lstrip().startswith("{"):
            return None
        try:
            value = decode(text)
        except ValueError:
            return None
        return value if isinstance(value, dict) and value and set(value) <= {p.name for p in self._named} else None

    def _describe(self) -> str:
        optional = (p.name if p.default is Parameter.empty else f"{p.name}={p.default!r:.40}" for p in self._named)
        return f"({', '.join(optional)})"

    def _schema(self) -> dict[str, Any]:
        try:
            schema = TypeAdapter[object](self._run).json_schema() if self._checked else {}  # type: ignore[arg-type]
        except PydanticUserError:  # a type, or a way to pass arguments, that JSON schemas do not know
            schema = {}
        if schema.get("type") == "object":
            return schema
        names = [p.name for p in self._named]
        return {"type": "object", "properties": {name: {} for name in names}, "required": names}


def _checked(name: str, function: Function) -> tuple[Function, bool]:
    """Wrap a function so that its arguments are checked. Returns it unchanged, and False, if it is not Python code."""
    of_python = inspect.isfunction(function) or inspect.ismethod(function) or isinstance(function, partial)
    target = function if of_python or inspect.isclass(function) else function.__call__  # type: ignore[operator]
    if not of_python and not inspect.ismethod(target):
        return function, False
    try:
        return validate_call(config={**_TYPES, "title": name})(target), True
    except (PydanticUserError, TypeError, NameError) as error:  # NameError: PydanticUndefinedAnnotation is one
        words = "annotate it with types that can be imported, or leave its annotations out"
        raise ConfigError(f"the types of the tool {name!r} cannot be read: {error}; {words}") from error


def _parameters_of(function: Function) -> list[Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # a C function without a signature
        return [Parameter("input", Parameter.POSITIONAL_ONLY)]


def _split_values(text: str) -> list[Any]:
    """Split ``2, "a, b"`` or ``[2, "a, b"]`` into values. Text that is not JSON stays text, as in ``2, Berlin``."""
    for written in (text, f"[{text}]"):
        try:
            value = decode(written)
        except ValueError:
            continue
        if isinstance(value, list):
            return value
    return [_parse_value(part.strip()) for part in text.split(",")]


def _parse_value(text: str) -> Any:
    try:
        return decode(text)
    except ValueError:
        return text
