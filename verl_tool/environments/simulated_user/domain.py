"""A domain: typed functions over a database of JSON, which the policy calls as tools (the shape of tau-bench's).

    from verl_tool.servers.tools import tool

    def initial_database():
        return {"orders": {"7": {"status": "pending"}}}

    @tool
    def cancel_order(database: dict, order: str) -> str:
        \"\"\"Cancel an order that is pending.\"\"\"
        if database["orders"][order]["status"] != "pending":
            raise ValueError("only pending orders can be cancelled")
        database["orders"][order]["status"] = "cancelled"
        return "cancelled"

The first parameter is the trajectory's own database. What a function raises is an observation.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl_tool.errors import ConfigError, SandboxError, ToolFault
from verl_tool.formats import Call
from verl_tool.formats.direct import DIRECT
from verl_tool.protocol import FaultKind, ToolDescription
from verl_tool.servers.tools.base import Context, InvalidCall, ToolResult
from verl_tool.servers.tools.typed.function_tool import Function, FunctionTool, mark_of, tool_type
from verl_tool.servers.tools.typed.signature import read_signature
from verl_tool.util.plugin import import_file

INITIAL = "initial_database"
"""Function of a domain's file that returns the database of rows without one of their own."""
Database = dict[str, Any]


class DomainFunction(FunctionTool):
    """A function of a domain. The context's state is the database."""

    async def run(self, call: Call, context: Context) -> ToolResult:
        function = partial(self.function, context.state, **await self.keyword_arguments(call, context))
        try:
            return await self.answer(self.called(function))
        except (InvalidCall, ToolFault, SandboxError):
            raise
        except Exception as error:  # noqa: BLE001 - anybody's function, and the arguments are the policy's
            return ToolResult(f"Error: {_describe(error)}", error=True)


class Domain:
    """The functions of one file. All trajectories share it; each has its own database."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file holds no functions, or one that cannot be a tool."""
        module = import_file(path)
        functions = [value for value in vars(module).values() if mark_of(value) and value.__module__ == module.__name__]
        if not functions:
            raise ConfigError(f"domain {path} has no tool; decorate functions of a database with @tool")
        self._functions = {made.name: made for made in map(_domain_function, functions)}
        initial = getattr(module, INITIAL, None)
        self._initial = _canonical(initial() if initial is not None else {}, f"{INITIAL} of domain {path}")

    @property
    def tools(self) -> list[ToolDescription]:
        return [
            ToolDescription(
                name=each.name,
                description=each.description,
                parameters=dict(each.parameters),
                example_actions=list(each.example_actions),
            )
            for each in self._functions.values()
        ]

    async def new_database(self, initial: Mapping[str, Any] | None) -> Database:
        """Return a database of its own, from the row's `initial` data or else the file's."""
        text = self._initial if initial is None else json.dumps(initial)
        return dict(await asyncio.to_thread(json.loads, text))

    async def call(self, database: Database, call: Call) -> ToolResult:
        """Run one call. Raises InvalidCall with words for the policy."""
        return await self._functions[call.name].run(call, Context("", None, database))

    async def replay(self, database: Database, actions: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Run the calls that a row names. Raises ToolFault if one fails: no policy wrote them."""
        for name, arguments in actions:
            try:
                if name not in self._functions:
                    raise InvalidCall(f"the domain has no such function; known: {', '.join(self._functions)}")
                result = await self.call(database, Call(name, json.dumps(arguments), 0, 0, DIRECT, dict(arguments)))
            except InvalidCall as error:
                raise _wrong_row(name, str(error)) from error
            if result.error:
                raise _wrong_row(name, result.text)


def state_hash(database: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a database. The order of keys does not matter. Raises ToolFault if it is not JSON."""
    try:
        return hashlib.sha256(_canonical(database, "the database").encode()).hexdigest()
    except ConfigError as error:
        raise ToolFault(FaultKind.MISCONFIGURED, str(error), retryable=False) from error


def _domain_function(function: Function) -> FunctionTool:
    mark = mark_of(function)
    assert mark is not None
    if not inspect.signature(function).parameters:
        raise ConfigError(f"tool {mark.name} of a domain has no parameter; its first one is the database")
    return tool_type(DomainFunction, function, read_signature(function, mark.name, method=True), mark)()


def _canonical(database: object, what: str) -> str:
    try:
        return json.dumps(database, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is no JSON: {error}; store texts, numbers, lists and objects alone") from error


def _wrong_row(name: str, why: str) -> ToolFault:
    words = f"the action {name} of the row's ground truth fails: {why}; correct the row"
    return ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)


def _describe(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) or not text else text
