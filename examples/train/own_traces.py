"""Example trajectories for a tool of one's own, for `tiny_model.py` to learn from.

A line of the file is a prompt and the turns of the model, in order; a turn that calls the tool ends with the call:

    {"prompt": "Reverse abc.", "turns": ["<reverse>abc</reverse>", "It is cba."]}

`prompt` is the user's message, or a list of messages with role and content. What the tool answers between two turns is
asked of the tool itself, so that it stands there character by character as in a training. A trace is inline: the
model's turn goes on behind the observation (`enable_mtrl=false`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traces import END, Part, Trace

from verl_tool.errors import VerlToolError
from verl_tool.protocol import StepRequest
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import load_tools


class TraceError(VerlToolError):
    """A trace that no model could write so; the message names its line."""


@dataclass(frozen=True)
class OwnTrace:
    """One line of the file."""

    where: str
    """Its file and number, for messages."""
    messages: list[dict[str, str]]
    turns: list[str]


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
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not _are_messages(messages) or not isinstance(turns, list) or not turns:
        raise TraceError(f"{where} must have a prompt (a text, or messages) and turns (a list of texts)")
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise TraceError(f"{where}: every turn must be a text that is not empty")
    return OwnTrace(where, messages, turns)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )


async def with_observations(traces: Sequence[OwnTrace], tool_type: str) -> list[Trace]:
    """Each trace with what the tools answer. Raises TraceError for a turn that is no call, or a last one that needs an
    answer; ConfigError if there is no such tool."""
    async with _running(tool_type) as tools:
        return [await _played(trace, tools, f"trace-{i}") for i, trace in enumerate(traces)]


@asynccontextmanager
async def _running(tool_type: str) -> AsyncIterator[ToolSet]:
    tools = ToolSet(load_tools(tool_type))
    await tools.start()
    try:
        yield tools
    finally:
        await tools.close(grace_seconds=1.0)


async def _played(trace: OwnTrace, tools: ToolSet, trajectory_id: str) -> Trace:
    parts: Trace = []
    for i, turn in enumerate(trace.turns):
        where, is_last = f"{trace.where}, turn {i + 1}", i + 1 == len(trace.turns)
        (result,) = await tools.step([StepRequest(trajectory_id, turn, i, is_last_step=is_last)])
        if result.fault is not None:
            raise TraceError(f"{where}: {result.fault.message}")
        if not is_last and not result.valid:
            raise TraceError(f"{where} is no call of these tools ({result.invalid_reason}): {turn!r:.80}")
        if not is_last and result.done:
            raise TraceError(f"{where} ends the trajectory, and more turns follow it")
        if is_last and result.valid and not result.done:
            raise TraceError(f"{where} is a call, and the last turn: add the turn that follows its answer")
        if result.valid and not ends_in_a_stop(turn, tools):
            raise TraceError(f"{where} must end where its call ends, with one of {', '.join(stops_of(tools))}")
        parts.append(Part(turn if result.valid else turn + END, True))
        if result.observation and result.valid:
            parts.append(Part(result.observation, False))
    await tools.step([StepRequest(trajectory_id, "", finish=True)])
    return parts


def stops_of(tools: ToolSet) -> list[str]:
    """Every string that may end a call of these tools."""
    return list(dict.fromkeys(stop for tool in tools.tools for fmt in tool.formats for stop in fmt.stop))


def ends_in_a_stop(turn: str, tools: ToolSet) -> bool:
    """Whether the loop would stop the model right behind this turn."""
    return turn.endswith(tuple(stops_of(tools)))


def stops_in(traces: Sequence[OwnTrace], tool_type: str) -> list[str]:
    """The strings at which the turns of these traces stop: what `action_stop_tokens` must be in a training."""
    stops = stops_of(ToolSet(load_tools(tool_type)))
    turns = [turn for trace in traces for turn in trace.turns]
    return [stop for stop in stops if any(turn.endswith(stop) for turn in turns)]
