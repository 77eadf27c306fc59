"""Find the calls in an action, and the tool that runs each."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from verl_tool.formats import Call, Format
from verl_tool.formats.direct import DIRECT
from verl_tool.formats.find import without_overlap
from verl_tool.formats.load import specs_of
from verl_tool.protocol import Opening
from verl_tool.servers.tools.base import Tool

IN_THREAD_CHARACTERS = 4 << 10
"""Longer actions are searched in a thread. In the worst case, a search takes a microsecond per character."""
AT_A_TIME_CHARACTERS = 8 << 10
"""Maximum number of characters of other actions to search before the event loop runs other work."""


# One thread, so that the event loop competes with only one search for the interpreter.
_finder = ThreadPoolExecutor(1, thread_name_prefix="call-finder")


@dataclass(frozen=True)
class MatchedCall:
    """One call, and the tool that runs it."""

    tool: Tool
    call: Call


class CallFinder:
    """Finds the calls of several tools in one action. The parser of each format runs once."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._rank = {id(tool): i for i, tool in enumerate(tools)}
        self._by_name = {name: tool for tool in reversed(tools) for name in tool.call_names[::-1]}
        self._tools_by_format = _tools_by_format(tools)
        self._own_ways = [tool for tool in tools if type(tool).recognise is not Tool.recognise]
        self._read = 0
        """Number of characters searched since the event loop last ran other work."""
        self._turn = asyncio.Lock()

    async def find_async(
        self, action: str, only: Sequence[Tool] | None = None, formats: Collection[str] | None = None
    ) -> tuple[list[MatchedCall], list[Call]]:
        """Call `find` without blocking the event loop, for actions of any length and number."""
        length = len(action)
        if length > IN_THREAD_CHARACTERS:
            return await asyncio.get_running_loop().run_in_executor(_finder, self.find, action, only, formats)
        if self._read + length > AT_A_TIME_CHARACTERS:
            async with self._turn:
                while self._read + length > AT_A_TIME_CHARACTERS:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                self._begin_to_read(length)
        else:
            self._begin_to_read(length)
        return self.find(action, only, formats)

    def direct(self, action: str, only: Sequence[Tool] | None = None) -> tuple[list[MatchedCall], list[Call]]:
        """Find the call in an action that consists of one JSON call (`DIRECT_FIELD`). Returns the same as `find`."""
        call = DIRECT.find_calls(action)[0]
        receiver = self._by_name.get(call.name)
        if receiver is None or (only is not None and receiver not in only):
            return [], [call]
        return [MatchedCall(receiver, call)], []

    def _begin_to_read(self, length: int) -> None:
        if self._read == 0:
            asyncio.get_running_loop().call_soon(self._loop_had_its_turn)
        self._read += length

    def _loop_had_its_turn(self) -> None:
        self._read = 0

    def find(
        self, action: str, only: Sequence[Tool] | None = None, formats: Collection[str] | None = None
    ) -> tuple[list[MatchedCall], list[Call]]:
        """Return the calls to run, in the order of the text, and the calls of unknown tools.

        Of overlapping calls, the one that begins first is run, and of those that begin at the same position, that of
        the first tool in the list. `only` restricts the tools, and `formats` the formats in which calls are found.
        """
        matched: list[MatchedCall] = []
        unknown: list[Call] = []
        for fmt, tools_by_name in self._tools_by_format:
            if formats is not None and not is_among(fmt, formats):
                continue
            for call in fmt.find_calls(action):
                receiver = tools_by_name.get(call.name)
                if receiver is not None:
                    matched.append(MatchedCall(receiver, call))
                else:
                    unknown.append(call)
        for tool in self._own_ways:
            own = tool.recognise(action)
            matched += [MatchedCall(tool, c) for c in own if formats is None or is_among(c.format, formats)]
        if only is not None:
            unknown += [match.call for match in matched if match.tool not in only]
            matched = [match for match in matched if match.tool in only]
        if len(matched) > 1:
            matched.sort(key=lambda match: (match.call.start, self._rank[id(match.tool)]))
            matched = without_overlap(matched, lambda match: match.call)
        return _joined(matched), unknown


def claim_turn(
    environment: Tool, opening: Opening, action: str, matched: Sequence[MatchedCall], unknown: Sequence[Call]
) -> list[MatchedCall]:
    """Return `matched` with the calls of the environment's own tools among the `unknown` ones. A turn without a call is
    one call of the environment if it takes every turn. One with a broken call, or with a call in JSON of a tool that
    there is not, is no such turn if the environment has tools."""
    names = {tool.name for tool in opening.tools}
    own = [MatchedCall(environment, call) for call in unknown if call.name in names]
    calls = [*matched, *own]
    if len(calls) > 1:
        calls = without_overlap(sorted(calls, key=lambda match: match.call.start), lambda match: match.call)
    mistaken = bool(names) and any(call.error is not None or call.arguments is not None for call in unknown)
    if calls or mistaken or not opening.every_turn:
        return calls
    return [MatchedCall(environment, Call(environment.name, action, 0, len(action), DIRECT))]


def is_among(fmt: Format, formats: Collection[str]) -> bool:
    """Return whether `formats` names `fmt`."""
    return any(spec in formats for spec in specs_of(fmt))


def _tools_by_format(tools: Sequence[Tool]) -> list[tuple[Format, dict[str, Tool]]]:
    """Return each format once, with the first tool of each name. Tools with their own `recognise` are left out."""
    formats: dict[int, tuple[Format, dict[str, Tool]]] = {}
    for tool in tools:
        for fmt in tool.formats:
            _, tools_by_name = formats.setdefault(id(fmt), (fmt, {}))
            if type(tool).recognise is Tool.recognise:
                for name in tool.call_names:
                    tools_by_name.setdefault(name, tool)
    return list(formats.values())


def _joined(matched: list[MatchedCall]) -> list[MatchedCall]:
    """Join consecutive calls of one tool by `Tool.join`."""
    groups = [list(group) for _, group in groupby(matched, key=lambda match: id(match.tool))]
    return [
        MatchedCall(group[0].tool, call)
        for group in groups
        for call in group[0].tool.join([match.call for match in group])
    ]
