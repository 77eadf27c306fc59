"""A typed function as a tool.

@tool
async def weather(city: str, days: int = 3) -> str:
    \"\"\"Forecast for a city.

    Args:
        city: Name of the city.
        days: Days ahead.
    \"\"\"
    return f"{city}: sun for {days} days"
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import new_class
from typing import Any, ClassVar, TypeVar, cast, overload

from pydantic_core import PydanticSerializationError, to_jsonable_python

from verl_tool.content.parts import AudioPart, ImagePart
from verl_tool.errors import ConfigError
from verl_tool.formats import Call
from verl_tool.servers.tools.base import CallError, Context, InvalidCall, Tool, ToolResult
from verl_tool.servers.tools.typed.arguments import read_arguments
from verl_tool.servers.tools.typed.example import example_call
from verl_tool.servers.tools.typed.signature import Signature, read_signature
from verl_tool.servers.tools.typed.threads import Threads

Function = Callable[..., object]
_F = TypeVar("_F", bound=Function)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_MARK = "__verl_tool__"
_LONG_CHARACTERS = 1024


@dataclass(frozen=True)
class Mark:
    """What `tool` was told about a function."""

    name: str
    aliases: tuple[str, ...]
    example_actions: tuple[str, ...]


@overload
def tool(function: _F, /) -> _F: ...
@overload
def tool(
    *, name: str | None = None, aliases: Sequence[str] = (), example_actions: Sequence[str] = ()
) -> Callable[[_F], _F]: ...
def tool(
    function: _F | None = None,
    /,
    *,
    name: str | None = None,
    aliases: Sequence[str] = (),
    example_actions: Sequence[str] = (),
) -> _F | Callable[[_F], _F]:
    """Makes a tool of a function, or of a method of a `TrajectoryTools`; it can still be called as a function.

    Its name, description and JSON schema come from its signature and docstring (Google's, numpy's or reST's style).
    Before it runs, arguments are checked and brought to their types by pydantic; what is wrong with them is the
    observation. A parameter that is annotated with `Context` gets the call's context, one annotated with a subclass of
    `ToolOptions` the tool's options. A function that is not a coroutine function runs in a thread.

    It returns a text, an image or audio (`ImagePart`, `AudioPart`), a list of these, a `ToolResult`, or a value that
    the model reads as JSON. It raises `CallError` if it failed by the model's own doing, `InvalidCall` if the call
    makes no sense, and `ToolFault` if infrastructure failed; any other exception becomes the fault ``tool_crashed``.

    `name`: in place of the function's own. `aliases`, `example_actions`: as `Tool` has them. Raises ConfigError for
    what is no function, or for a name that no JSON call can bear.
    """

    def mark(marked: _F) -> _F:
        if not inspect.isfunction(marked):
            raise ConfigError(
                f"@tool stands before {marked!r:.80}; it makes a tool of a function or a method, and takes name=…"
            )
        chosen = marked.__name__ if name is None else name
        if not is_tool_name(chosen):
            raise ConfigError(f"{chosen!r:.80} cannot name a tool; use up to 64 letters, digits, '_' and '-'")
        setattr(marked, _MARK, Mark(chosen, tuple(aliases), tuple(example_actions)))
        return marked

    return mark if function is None else mark(function)


def is_tool_name(name: str) -> bool:
    """Whether every model's template and every API can carry it."""
    return _NAME.fullmatch(name) is not None


def mark_of(value: object) -> Mark | None:
    """What `tool` was told about it; None if it is no typed tool."""
    mark = getattr(value, _MARK, None) if inspect.isfunction(value) else None
    return mark if isinstance(mark, Mark) else None


class FunctionTool(Tool):
    """A tool that is a function. `function_tool` makes a subclass for each."""

    function: ClassVar[Function]
    signature: ClassVar[Signature]

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._threads = Threads(self.name)

    async def check(self) -> None:
        self._threads.check()

    async def run(self, call: Call, context: Context) -> ToolResult:
        function = partial(self.function, **await self.keyword_arguments(call, context))
        return await self.answer(self.called(function))

    async def keyword_arguments(self, call: Call, context: Context) -> dict[str, Any]:
        """What the function is called with. Raises InvalidCall."""
        # An action may hold hundreds of calls: the event loop has its turn between those that take long to read.
        if len(call.input) > _LONG_CHARACTERS:
            await asyncio.sleep(0)
        try:
            arguments = read_arguments(self.signature, call)
        except InvalidCall:
            await asyncio.sleep(0)
            raise
        injected = {self.signature.context: context, self.signature.options: self.options}
        return {**arguments, **{name: value for name, value in injected.items() if name is not None}}

    async def called(
        self, function: Callable[[], object], on_thread: Callable[[asyncio.Future[Any]], object] | None = None
    ) -> object:
        """What `function` returns, awaited or run in a thread. `on_thread` is given the thread's end."""
        try:
            if inspect.iscoroutinefunction(function):
                return await function()
            thread = await self._threads.begin(function)
            if on_thread is not None:
                on_thread(thread)
            value = await self._threads.outcome(thread)
            return await value if inspect.isawaitable(value) else value
        except SystemExit as error:
            # It would end the server.
            raise RuntimeError(f"the function called exit({error.code!r:.40}); raise CallError instead") from error

    async def answer(self, value: Awaitable[object]) -> ToolResult:
        """What the model is told of what a function returned, or of the `CallError` that it raised."""
        try:
            return result_of(await value, self.name)
        except CallError as error:
            return ToolResult(f"Error: {error}", error=True)


def result_of(value: object, name: str) -> ToolResult:
    """What a typed function returned, as the model reads it: a text as it is, an image or audio, or a list with some,
    as parts, all else as JSON. Raises TypeError if JSON cannot hold it."""
    if isinstance(value, ToolResult):
        return value
    values = value if isinstance(value, (list, tuple)) else (value,)
    if any(isinstance(each, (ImagePart, AudioPart)) for each in values):
        return ToolResult(parts=values)
    if value is None or isinstance(value, str):
        return ToolResult(value or "")
    try:
        plain = to_jsonable_python(value, inf_nan_mode="constants")
        return ToolResult(plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False))
    except (PydanticSerializationError, ValueError, TypeError) as error:
        raise TypeError(
            f"{name} returned a {type(value).__name__}, which is no text and not to be written as JSON ({error}); "
            "return a text or a ToolResult"
        ) from error


@cache
def function_tool(function: Function) -> type[FunctionTool]:
    """The tool that a function is; the same class each time. Raises ConfigError if it cannot be one."""
    mark = mark_of(function)
    if mark is None:
        raise ConfigError(f"{function!r:.80} is no typed tool; decorate it with @tool")
    return tool_type(FunctionTool, function, read_signature(function, mark.name), mark)


def tool_type(
    base: type[FunctionTool], function: Function, signature: Signature, mark: Mark, **attributes: Any
) -> type[FunctionTool]:
    """A subclass of `base` that runs `function`."""
    parameters = signature.schema()
    members = {
        "__module__": function.__module__,
        "__doc__": signature.description,
        "name": mark.name,
        "aliases": mark.aliases,
        "description": signature.description,
        "parameters": parameters,
        "example_actions": mark.example_actions or (example_call(mark.name, parameters),),
        "Options": signature.options_model,
        "function": staticmethod(function),
        "signature": signature,
        **attributes,
    }
    made = new_class(function.__name__, (base,), exec_body=lambda space: space.update(members))
    return cast("type[FunctionTool]", made)
