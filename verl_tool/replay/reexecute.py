"""Run the calls of stored trajectories again on a tool server, and compare its answers with the stored ones."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from rich.table import Table

from eval_service.evaluation.dataset import Problem
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.trajectory import CallRecord, Trajectory
from verl_tool.client import ToolClient
from verl_tool.content.parts import to_wire
from verl_tool.errors import ConfigError
from verl_tool.protocol import (
    DIRECT_FIELD,
    FORMATS_FIELD,
    IMAGES_FIELD,
    SENT_ONCE,
    TOOLS_FIELD,
    TURNS_LEFT_FIELD,
    StepResult,
)
from verl_tool.replay.stored import StoredAnswer
from verl_tool.servers.tools import tool_classes
from verl_tool.servers.tools.base import Tool

BATCH_SIZE = 64
"""Number of trajectories whose calls run concurrently."""
MAX_DISPLAY_CHARACTERS = 100
NO_TOOL = "(no tool)"
"""Name in the report for calls that match no tool."""


@dataclass(frozen=True)
class Drift:
    """A call whose answer differs from the stored one."""

    where: str
    """File, line and number of the call: ``step_3.jsonl:17#0``."""
    tool: str
    action: str
    was: str
    now: str
    """The server's answer, or why there is none."""

    def to_json(self) -> str:
        return json.dumps(vars(self), ensure_ascii=False)

    @property
    def excerpts(self) -> list[str]:
        """Both answers, from shortly before the first difference."""
        pairs = zip(self.was, self.now, strict=False)
        start = max(0, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) - 20)
        return ["…" * bool(start) + repr(text[start:][:MAX_DISPLAY_CHARACTERS])[1:-1] for text in (self.was, self.now)]


@dataclass
class ToolFigures:
    calls: int = 0
    different: int = 0
    faults: int = 0
    """Calls that failed now."""
    seconds_before: float = 0.0
    seconds_now: float = 0.0


@dataclass
class ReexecutionReport:
    trajectories: int = 0
    without_row: list[str] = field(default_factory=list)
    without_observation: int = 0
    """Calls that had failed in the run, so there is nothing to compare with."""
    tools: dict[str, ToolFigures] = field(default_factory=lambda: defaultdict(ToolFigures))
    drifts: list[Drift] = field(default_factory=list)

    def summary(self) -> str:
        calls, different = (sum(getattr(tool, name) for tool in self.tools.values()) for name in ("calls", "different"))
        text = f"{calls} calls of {self.trajectories} trajectories run again, {different} answered differently"
        faults = sum(tool.faults for tool in self.tools.values())
        text += f", {faults} not answered" if faults else ""
        text += f"; {self.without_observation} had failed before" if self.without_observation else ""
        return text + (f"; {len(self.without_row)} trajectories without a row" if self.without_row else "")

    def lines(self) -> list[str]:
        return [drift.to_json() for drift in self.drifts]

    def unexpected_count(self, known: Collection[tuple[str, object]], *, reward_changed: bool = False) -> int:
        """Count the trajectories without a row and the drifts that are not in `known`: pairs of `where` and `now`."""
        return sum((drift.where, drift.now) not in known for drift in self.drifts) + len(self.without_row)

    def tables(self) -> list[Table]:
        """Tabulate the figures and some drifts of each tool."""
        return [self._tabulate_figures(), *([tabulate_drifts(self.drifts)] if self.drifts else [])]

    def _tabulate_figures(self) -> Table:
        table = Table("tool", "calls", "different", "not answered", "seconds per call then", "now")
        for name, tool in sorted(self.tools.items()):
            seconds = [f"{total / max(1, tool.calls):.3f}" for total in (tool.seconds_before, tool.seconds_now)]
            table.add_row(name, *map(str, (tool.calls, tool.different, tool.faults)), *seconds)
        return table


def tabulate_drifts(drifts: Iterable[Drift], per_tool: int = 3) -> Table:
    """Tabulate the first drifts of each tool."""
    table = Table("tool", "call", "action", "then", "now")
    counts: dict[str, int] = defaultdict(int)
    for drift in drifts:
        counts[drift.tool] += 1
        if counts[drift.tool] <= per_tool:
            table.add_row(drift.tool, drift.where, repr(drift.action[-MAX_DISPLAY_CHARACTERS:])[1:-1], *drift.excerpts)
    return table


class ObservationComparison:
    """Compare observations by the rules of the called tools (`Tool.comparable`)."""

    def __init__(self, specs: Sequence[str]) -> None:
        """`specs`: names and paths of the server's tools. Answers of tools unknown here are compared exactly."""
        self._by_name: dict[str, type[Tool]] = {}
        for spec in specs:
            try:
                kinds = tool_classes(spec)
            except ConfigError:
                continue
            self._by_name |= {name: kind for kind in kinds for name in (kind.name, *kind.aliases)}

    def tool_name(self, call: CallRecord) -> str:
        """Return the tool's own name, or the names that the model called."""
        names = dict.fromkeys(kind.name if (kind := self._by_name.get(name)) else name for name in call.names)
        return "+".join(names) or NO_TOOL

    def is_same(self, call: CallRecord, now: StepResult) -> bool:
        """Whether `now` equals the stored answer to `call`."""
        if (call.valid, call.done) != (now.valid, now.done):
            return False
        return self._normalize(call, call.observation) == self._normalize(call, now.observation)

    def _normalize(self, call: CallRecord, observation: str) -> str:
        for name in call.names:
            if name in self._by_name:
                observation = self._by_name[name].comparable(observation)
        return observation


class Reexecution:
    """Runs the calls of many trajectories concurrently, each in order and under a new id, as the loop does."""

    def __init__(
        self, client: ToolClient, comparison: ObservationComparison, options: Mapping[bool, EpisodeOptions]
    ) -> None:
        """`options`: those of the run's training (key False) and of its validation (key True)."""
        self._client, self._comparison, self._options = client, comparison, options
        self.report = ReexecutionReport()

    async def run(self, stored: Iterable[StoredAnswer]) -> ReexecutionReport:
        """Run all calls of `stored`. The report lists drifts in the order of the trajectories."""
        remaining = iter(stored)
        while batch := list(islice(remaining, BATCH_SIZE)):
            for drifts in await asyncio.gather(*(self._reexecute(one) for one in batch)):
                self.report.drifts += drifts
        return self.report

    async def _reexecute(self, stored: StoredAnswer) -> list[Drift]:
        trajectory = stored.trajectory
        if trajectory is None or not trajectory.calls:
            return []
        if stored.row is None:
            self.report.without_row.append(stored.where)
            return []
        self.report.trajectories += 1
        options = self._options[stored.is_validation]
        trajectory_id, drifts = uuid.uuid4().hex, []
        extras = build_call_extras(trajectory, stored.row, options)
        async for call, now, seconds in replay_calls(self._client, trajectory_id, trajectory.calls, extras, options):
            drifts += self._compare(stored, call, now, seconds)
        await self._client.finish([trajectory_id])
        return drifts

    def _compare(self, stored: StoredAnswer, call: CallRecord, now: StepResult, seconds: float) -> list[Drift]:
        if call.fault is not None:
            self.report.without_observation += 1
            return []
        name = self._comparison.tool_name(call)
        tool = self.report.tools[name]
        tool.calls += 1
        tool.seconds_before, tool.seconds_now = tool.seconds_before + call.seconds, tool.seconds_now + seconds
        if now.fault is None and self._comparison.is_same(call, now):
            return []
        tool.different += now.fault is None
        tool.faults += now.fault is not None
        return [describe_drift(stored.where, name, call, now)]


async def replay_calls(
    client: ToolClient,
    trajectory_id: str,
    calls: Sequence[CallRecord],
    extras: Sequence[Mapping[str, Any]],
    options: EpisodeOptions,
) -> AsyncIterator[tuple[CallRecord, StepResult, float]]:
    """Run `calls` with their extra data (`build_call_extras`), up to the first fault. Yield each call, its answer and
    its duration in seconds."""
    for call, extra in zip(calls, extras, strict=True):
        started = asyncio.get_running_loop().time()
        last = extra[TURNS_LEFT_FIELD] <= int(not options.force_finish_for_last_turn)
        now = await client.call(trajectory_id, call.action, step=call.step, extra=extra, is_last_step=last)
        yield call, now, asyncio.get_running_loop().time() - started
        if now.fault is not None:
            return


def describe_drift(where: str, tool: str, call: CallRecord, now: StepResult) -> Drift:
    """Describe a changed answer to a call of `tool` in the trajectory at `where`."""
    return Drift(f"{where}#{call.step}", tool, call.action, *_format_answers(call, now))


def _format_answers(call: CallRecord, now: StepResult) -> tuple[str, str]:
    """Return both observations, preceded by `valid` and `done` if these differ."""
    answer = now.observation if now.fault is None else f"fault {now.fault.kind.value}: {now.fault.message}"
    if now.fault is not None or (call.valid, call.done) == (now.valid, now.done):
        return call.observation, answer
    return f"[valid={call.valid} done={call.done}]{call.observation}", f"[valid={now.valid} done={now.done}]{answer}"


def build_call_extras(trajectory: Trajectory, row: Problem, options: EpisodeOptions) -> list[dict[str, Any]]:
    """Return the extra data that the loop sent with each call, without the verifier. Raises ConfigError for a
    trajectory with sub-agents."""
    if any(call.agent or call.local for call in trajectory.calls):
        raise ConfigError(
            f"trajectory {trajectory.trajectory_id} has sub-agents, whose calls cannot be run again; leave it out"
        )
    maximum = options.max_turns if row.max_turns is None else row.max_turns
    turns_left = maximum + int(not options.force_finish_for_last_turn)
    common = {name: value for name, value in row.tools_kwargs.items() if name not in SENT_ONCE}
    if row.tools is not None:
        common[TOOLS_FIELD] = list(row.tools)
    if options.formats:
        common[FORMATS_FIELD] = list(options.formats)
    first_only: dict[str, Any] = {name: row.tools_kwargs[name] for name in SENT_ONCE if name in row.tools_kwargs}
    if row.images:
        first_only[IMAGES_FIELD] = [to_wire(image) for image in row.images]
    # A call that the loop makes before the model's first turn has no action.
    tool_first = bool(trajectory.calls) and not trajectory.calls[0].action
    extras = []
    for number in range(len(trajectory.calls)):
        turn = number + int(not tool_first)
        direct = {DIRECT_FIELD: True} if trajectory.calls[number].over_mcp else {}
        extras.append({**common, **(first_only if number == 0 else {}), **direct, TURNS_LEFT_FIELD: turns_left - turn})
    return extras


async def reexecute(
    stored: Iterable[StoredAnswer], url: str, tools: Sequence[str], options: Mapping[bool, EpisodeOptions]
) -> ReexecutionReport:
    """Run the calls of `stored` on the server at `url`. For `tools` see `ObservationComparison`, for `options`
    `Reexecution`."""
    settings: dict[str, Any] = dict(options[False].client_settings())
    async with ToolClient(url, api_key=os.environ.get("VERL_TOOL_API_KEY"), **settings) as client:
        known = tools or [tool.name for tool in await client.tools()]
        return await Reexecution(client, ObservationComparison(known), options).run(stored)
