"""Example trajectories for a tool of one's own, for `tiny_model.py` to learn from.

A line of the file is a prompt and the turns of the model, in order; a turn that calls the tool ends with the call:

    {"prompt": "Reverse abc.", "turns": ["<reverse>abc</reverse>", "It is cba."]}

`prompt` is the user's message, or a list of messages with role and content. `tools_kwargs`, if it is there, is what the
row of a data set has in `extra_info.tools_kwargs`: the state that its tools begin with. What the tool answers between
two turns is asked of the tool itself, so that it stands there character by character as in a training; a call that
fails is no lesson. A trace is inline: the model's turn goes on behind the observation (`enable_mtrl=false`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traces import END, Part, Trace

from verl_tool.agent_loop.row import build_call_extra, listed_tools
from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.protocol import FILES_FIELD
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tools import Tool, load_tools

KEYS = frozenset(("prompt", "turns", "tools_kwargs"))
"""Of a line."""


class TraceError(VerlToolError):
    """A trace that no model could write so; the message names its line."""


@dataclass(frozen=True)
class OwnTrace:
    """One line of the file."""

    where: str
    """Its file and number, for messages."""
    messages: list[dict[str, str]]
    turns: list[str]
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Goes to the tools with every call."""


def read_traces(path: Path) -> list[OwnTrace]:
    """All lines of the file. Raises TraceError."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    found = [_read(line, f"{path}, line {i + 1}") for i, line in enumerate(lines) if line.strip()]
    if not found:
        raise TraceError(f"{path} holds no traces; a line of it is {{'prompt': …, 'turns': […]}}")
    return found


def _read(line: str, where: str) -> OwnTrace:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where} is no JSON: {error}") from error
    prompt, turns = (row.get("prompt"), row.get("turns")) if isinstance(row, Mapping) else (None, None)
    unknown = sorted(set(row) - KEYS) if isinstance(row, Mapping) else []
    if unknown:
        raise TraceError(f"{where} has {', '.join(map(repr, unknown))}, which nobody reads; it may have {sorted(KEYS)}")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not _are_messages(messages) or not isinstance(turns, list) or not turns:
        raise TraceError(f"{where} must have a prompt (a text, or messages) and turns (a list of texts)")
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise TraceError(f"{where}: every turn must be a text that is not empty")
    return OwnTrace(where, messages, turns, _extra(row.get("tools_kwargs"), where))


def _extra(tools_kwargs: Any, where: str) -> dict[str, Any]:
    """What a row with these ``tools_kwargs`` sends with its calls."""
    if tools_kwargs is not None and not isinstance(tools_kwargs, Mapping):
        raise TraceError(f"{where}: tools_kwargs must be an object, as in extra_info.tools_kwargs of a row")
    try:
        return build_call_extra(tools_kwargs, listed_tools(tools_kwargs, None, where), where)
    except ConfigError as error:
        raise TraceError(str(error)) from None


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )


async def with_observations(traces: Sequence[OwnTrace], tool_type: str) -> list[Trace]:
    """Each trace with what the tools answer. Raises TraceError for a turn that is no call, or a last one that needs an
    answer; ConfigError if there is no such tool."""
    loaded = load_tools(tool_type)
    stops = stops_of(loaded)
    async with InProcessTools(loaded) as tools:
        return [await _played(trace, tools, stops, f"trace-{i}") for i, trace in enumerate(traces)]


async def _played(trace: OwnTrace, tools: InProcessTools, stops: Sequence[str], trajectory_id: str) -> Trace:
    parts: Trace = []
    for i, turn in enumerate(trace.turns):
        where, is_last = f"{trace.where}, turn {i + 1}", i + 1 == len(trace.turns)
        # Files of a workspace go with the first call alone, as in a training.
        extra = {name: value for name, value in trace.extra.items() if i == 0 or name != FILES_FIELD}
        result = await tools.call(trajectory_id, turn, step=i, extra=extra, is_last_step=is_last)
        if result.fault is not None:
            raise TraceError(f"{where}: {result.fault.message}")
        if result.valid and (result.metrics or {}).get("error"):
            raise TraceError(
                f"{where}: the call fails, which is no lesson: {result.observation.strip()[:200]!r}. If the tool "
                "begins with the state of a row, give it: tools_kwargs, as in extra_info.tools_kwargs of the row"
            )
        if not is_last and not result.valid:
            raise TraceError(f"{where} is no call of these tools ({result.invalid_reason}): {turn!r:.80}")
        if not is_last and result.done:
            raise TraceError(f"{where} ends the trajectory, and more turns follow it")
        if is_last and result.valid and not result.done:
            raise TraceError(f"{where} is a call, and the last turn: add the turn that follows its answer")
        if result.valid and not turn.endswith(tuple(stops)):
            raise TraceError(f"{where} must end where its call ends, with one of {', '.join(stops)}")
        parts.append(Part(turn if result.valid else turn + END, True))
        if result.observation and result.valid:
            parts.append(Part(result.observation, False))
    await tools.call(trajectory_id, "", finish=True)
    return parts


def stops_of(tools: Sequence[Tool]) -> list[str]:
    """Every string that may end a call of these tools."""
    return list(dict.fromkeys(stop for tool in tools for fmt in tool.formats for stop in fmt.stop))


def stops_in(traces: Sequence[OwnTrace], tool_type: str) -> list[str]:
    """The strings at which the turns of these traces stop: what `action_stop_tokens` must be in a training."""
    stops = stops_of(load_tools(tool_type))
    turns = [turn for trace in traces for turn in trace.turns]
    return [stop for stop in stops if any(turn.endswith(stop) for turn in turns)]
