"""The calls of stored trajectories on a tool server again, and what it answers now."""

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
    FILES_FIELD,
    FORMATS_FIELD,
    IMAGES_FIELD,
    TOOLS_FIELD,
    TURNS_LEFT_FIELD,
    StepResult,
)
from verl_tool.replay.stored import Stored
from verl_tool.servers.tools import tool_classes
from verl_tool.servers.tools.base import Tool

AT_A_TIME = 64
"""Trajectories whose calls run side by side."""
MAX_DISPLAY_CHARACTERS = 100
UNKNOWN = "(no tool)"
"""What calls are counted under that no tool took."""


@dataclass(frozen=True)
class Drift:
    """A call that is answered otherwise than it was."""

    where: str
    """File, line and number of the call: ``step_3.jsonl:17#0``."""
    tool: str
    action: str
    was: str
    now: str
    """What the server answers, or why it does not."""

    def to_json(self) -> str:
        return json.dumps(vars(self), ensure_ascii=False)

    @property
    def excerpts(self) -> list[str]:
        """Both, from shortly before the first difference on."""
        pairs = zip(self.was, self.now, strict=False)
        start = max(0, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) - 20)
        return ["…" * bool(start) + repr(text[start:][:MAX_DISPLAY_CHARACTERS])[1:-1] for text in (self.was, self.now)]


@dataclass
class ToolFigures:
    calls: int = 0
    different: int = 0
    faults: int = 0
    """Calls that the server did not answer now."""
    seconds_before: float = 0.0
    seconds_now: float = 0.0


@dataclass
class ReexecutionReport:
    trajectories: int = 0
    without_row: list[str] = field(default_factory=list)
    without_observation: int = 0
    """Calls that were not answered then: nothing to compare with."""
    tools: dict[str, ToolFigures] = field(default_factory=lambda: defaultdict(ToolFigures))
    drifts: list[Drift] = field(default_factory=list)

    def words(self) -> str:
        calls, different = (sum(getattr(tool, name) for tool in self.tools.values()) for name in ("calls", "different"))
        words = (
            f"{calls} calls of {self.trajectories} trajectories run again, {different} answered otherwise than before"
        )
        faults = sum(tool.faults for tool in self.tools.values())
        words += f", {faults} not answered" if faults else ""
        words += f"; {self.without_observation} had no answer then" if self.without_observation else ""
        return words + (f"; {len(self.without_row)} trajectories without a row" if self.without_row else "")

    def lines(self) -> list[str]:
        return [drift.to_json() for drift in self.drifts]

    def unexpected_count(self, known: Collection[tuple[str, object]], *, asked: bool = False) -> int:
        """How many drifts are not `known` (where, and what is answered now), and trajectories without a row."""
        return sum((drift.where, drift.now) not in known for drift in self.drifts) + len(self.without_row)

    def tables(self) -> list[Table]:
        """The figures of each tool, and some drifts of each."""
        return [self._figures(), *([examples(self.drifts)] if self.drifts else [])]

    def _figures(self) -> Table:
        table = Table("tool", "calls", "different", "not answered", "seconds a call then", "now")
        for name, tool in sorted(self.tools.items()):
            seconds = [f"{total / max(1, tool.calls):.3f}" for total in (tool.seconds_before, tool.seconds_now)]
            table.add_row(name, *map(str, (tool.calls, tool.different, tool.faults)), *seconds)
        return table


def examples(drifts: Iterable[Drift], of_each: int = 3) -> Table:
    """The first drifts of each tool."""
    table = Table("tool", "call", "action", "then", "now")
    counts: dict[str, int] = defaultdict(int)
    for drift in drifts:
        counts[drift.tool] += 1
        if counts[drift.tool] <= of_each:
            table.add_row(drift.tool, drift.where, repr(drift.action[-MAX_DISPLAY_CHARACTERS:])[1:-1], *drift.excerpts)
    return table


class ObservationComparison:
    """Whether two observations say the same, by what the tools that were called say of it."""

    def __init__(self, specs: Sequence[str]) -> None:
        """`specs`: names and paths of the tools that the server has; one that is not known here is compared exactly."""
        self._by_name: dict[str, type[Tool]] = {}
        for spec in specs:
            try:
                kinds = tool_classes(spec)
            except ConfigError:
                continue
            self._by_name |= {name: kind for kind in kinds for name in (kind.name, *kind.aliases)}

    def tool_of(self, call: CallRecord) -> str:
        """The tool's own name, or those that the model called."""
        names = dict.fromkeys(kind.name if (kind := self._by_name.get(name)) else name for name in call.names)
        return "+".join(names) or UNKNOWN

    def same(self, call: CallRecord, now: StepResult) -> bool:
        """Whether `now` is what the call was answered then."""
        if (call.valid, call.done) != (now.valid, now.done):
            return False
        return self._compared(call, call.observation) == self._compared(call, now.observation)

    def _compared(self, call: CallRecord, observation: str) -> str:
        for name in call.names:
            if name in self._by_name:
                observation = self._by_name[name].comparable(observation)
        return observation


class Reexecution:
    """Runs calls again, many trajectories at once, each as the loop does: in its order, under an id of its own."""

    def __init__(
        self, client: ToolClient, comparison: ObservationComparison, options: Mapping[bool, EpisodeOptions]
    ) -> None:
        """`options`: of the run's training, and of its validation (key true)."""
        self._client, self._comparison, self._options = client, comparison, options
        self.report = ReexecutionReport()

    async def run(self, stored: Iterable[Stored]) -> ReexecutionReport:
        """All calls of `stored`; differences are told in their order."""
        remaining = iter(stored)
        while batch := list(islice(remaining, AT_A_TIME)):
            for drifts in await asyncio.gather(*(self._again(one) for one in batch)):
                self.report.drifts += drifts
        return self.report

    async def _again(self, stored: Stored) -> list[Drift]:
        trajectory = stored.trajectory
        if trajectory is None or not trajectory.calls:
            return []
        if stored.row is None:
            self.report.without_row.append(stored.where)
            return []
        self.report.trajectories += 1
        options = self._options[stored.of_validation]
        trajectory_id, drifts = uuid.uuid4().hex, []
        sent = sent_with(trajectory, stored.row, options)
        async for call, now, seconds in run_again(self._client, trajectory_id, trajectory.calls, sent, options):
            drifts += self._compared(stored, call, now, seconds)
        await self._client.finish([trajectory_id])
        return drifts

    def _compared(self, stored: Stored, call: CallRecord, now: StepResult, seconds: float) -> list[Drift]:
        if call.fault is not None:
            self.report.without_observation += 1
            return []
        name = self._comparison.tool_of(call)
        tool = self.report.tools[name]
        tool.calls += 1
        tool.seconds_before, tool.seconds_now = tool.seconds_before + call.seconds, tool.seconds_now + seconds
        if now.fault is None and self._comparison.same(call, now):
            return []
        tool.different += now.fault is None
        tool.faults += now.fault is not None
        return [drift_of(stored.where, name, call, now)]


async def run_again(
    client: ToolClient,
    trajectory_id: str,
    calls: Sequence[CallRecord],
    sent: Sequence[Mapping[str, Any]],
    options: EpisodeOptions,
) -> AsyncIterator[tuple[CallRecord, StepResult, float]]:
    """Each of `calls`, with its extra data in `sent` (`sent_with`), what it is answered now, and how many seconds that
    took; none behind a fault."""
    for call, extra in zip(calls, sent, strict=True):
        started = asyncio.get_running_loop().time()
        last = extra[TURNS_LEFT_FIELD] <= int(not options.force_finish_for_last_turn)
        now = await client.call(trajectory_id, call.action, step=call.step, extra=extra, is_last_step=last)
        yield call, now, asyncio.get_running_loop().time() - started
        if now.fault is not None:
            return


def drift_of(where: str, tool: str, call: CallRecord, now: StepResult) -> Drift:
    """What is different about a call of `tool` in the trajectory at `where`."""
    return Drift(f"{where}#{call.step}", tool, call.action, *_describe(call, now))


def _describe(call: CallRecord, now: StepResult) -> tuple[str, str]:
    """Both observations, with what else is different before them."""
    answer = now.observation if now.fault is None else f"fault {now.fault.kind.value}: {now.fault.message}"
    if now.fault is not None or (call.valid, call.done) == (now.valid, now.done):
        return call.observation, answer
    return f"[valid={call.valid} done={call.done}]{call.observation}", f"[valid={now.valid} done={now.done}]{answer}"


def sent_with(trajectory: Trajectory, row: Problem, options: EpisodeOptions) -> list[dict[str, Any]]:
    """The extra data of each call, as the loop sent them. A verifier is not run again. Raises ConfigError for a
    trajectory with sub-agents."""
    if any(call.agent or call.local for call in trajectory.calls):
        raise ConfigError(
            f"trajectory {trajectory.trajectory_id} has sub-agents, and calls of several agents are not run again; "
            "leave it out"
        )
    maximum = options.max_turns if row.max_turns is None else row.max_turns
    behind_first = maximum + int(not options.force_finish_for_last_turn)
    own = {name: value for name, value in row.tools_kwargs.items() if name != FILES_FIELD}
    if row.tools is not None:
        own[TOOLS_FIELD] = list(row.tools)
    if options.formats:
        own[FORMATS_FIELD] = list(options.formats)
    once: dict[str, Any] = {}
    if FILES_FIELD in row.tools_kwargs:
        once[FILES_FIELD] = row.tools_kwargs[FILES_FIELD]
    if row.images:
        once[IMAGES_FIELD] = [to_wire(image) for image in row.images]
    # The loop's own call, before the model's first turn, has no action.
    first_request = bool(trajectory.calls) and not trajectory.calls[0].action
    sent = []
    for number in range(len(trajectory.calls)):
        written = number + int(not first_request)
        direct = {DIRECT_FIELD: True} if trajectory.calls[number].over_mcp else {}
        sent.append({**own, **(once if number == 0 else {}), **direct, TURNS_LEFT_FIELD: behind_first - written})
    return sent


async def reexecute(
    stored: Iterable[Stored], url: str, tools: Sequence[str], options: Mapping[bool, EpisodeOptions]
) -> ReexecutionReport:
    """Run the calls of `stored` on the server at `url`; the rest is as of `ObservationComparison` and `Reexecution`."""
    settings: dict[str, Any] = dict(options[False].client_settings())
    async with ToolClient(url, api_key=os.environ.get("VERL_TOOL_API_KEY"), **settings) as client:
        known = tools or [tool.name for tool in await client.tools()]
        return await Reexecution(client, ObservationComparison(known), options).run(stored)
