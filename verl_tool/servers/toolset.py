"""The tools of one replica, and what it owes to each trajectory: order, state, and every step run once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from verl_tool.errors import ConfigError, SandboxError, ToolFault
from verl_tool.protocol import FaultKind, StepRequest, StepResult, ToolDescription
from verl_tool.servers.admission import Admission
from verl_tool.servers.calls import CallFinder, Claim
from verl_tool.servers.metrics import NO_TOOL, ToolMetrics
from verl_tool.servers.observation import merge, not_understood, unrunnable
from verl_tool.servers.tools.base import Context, Tool, ToolResult
from verl_tool.servers.trajectory_table import Record, Trajectory, TrajectoryTable

log = logging.getLogger(__name__)

TOOL_FIELD = "tool_name"
"""Entry of a request's extra data that names the one tool that may take this trajectory's action."""


class _CallFault(ToolFault):
    """A fault of one tool's call."""

    def __init__(self, tool: Tool, kind: FaultKind, message: str, retryable: bool) -> None:
        super().__init__(kind, message, retryable)
        self.tool = tool.name


@dataclass(frozen=True)
class ToolSetStats:
    """What a tool set holds at this moment."""

    trajectories: int
    """Live trajectories that are remembered."""
    running: int
    """Actions that run or wait for their turn."""
    record_bytes: int
    """Bytes of recorded answers, roughly."""
    live_by_tool: dict[str, int]
    """Live trajectories that have called the tool."""


class ToolSet:
    """Several tools behind one `step`.

    An action's calls are found in all tools' formats, run in the order of the text, and their observations are put
    together, each rendered in the dialect of its call. One trajectory's actions run one after the other, different
    trajectories at the same time.

    Exactly once: a request that carries a step is run once and its answer recorded; sent again, it is answered from the
    record, or waits for the run that is going on. A run whose caller has left goes on if its step is recorded, and is
    cancelled otherwise.

    `state_ttl_seconds`: an idle trajectory's state is freed after it. `record_ttl_seconds`: how long the answer to a
    step is known. `call_timeout_seconds`: the longest that one action may take, its wait for its turn included.
    `on_released(trajectory_id, lost)`: called when this replica no longer knows a trajectory; `lost` if a state of it
    was dropped before anybody had finished it.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        state_ttl_seconds: float = 3600.0,
        record_ttl_seconds: float = 600.0,
        max_trajectories: int = 100_000,
        max_record_bytes: int = 256 << 20,
        call_timeout_seconds: float = 600.0,
        done_if_invalid: bool = False,
        on_released: Callable[[str, bool], None] | None = None,
    ) -> None:
        _refuse_bad_options(tools, state_ttl_seconds, record_ttl_seconds, max_trajectories, call_timeout_seconds)
        self.tools = tuple(tools)
        self.stateful = any(tool.stateful for tool in tools)
        self.metrics = ToolMetrics([tool.name for tool in tools])
        self.metrics.add_gauge(
            "verl_tool_live_trajectories", "Live trajectories that have called the tool.", self._live_by_tool
        )
        self._by_name = {tool.name: tool for tool in self.tools}
        self._finder = CallFinder(self.tools)
        self._call_timeout = call_timeout_seconds
        self._sweep_every = min(30.0, state_ttl_seconds / 4, record_ttl_seconds / 4)
        self._done_if_invalid = done_if_invalid
        self._on_released = on_released
        self._table = TrajectoryTable(
            stateful=self.stateful,
            state_ttl_seconds=state_ttl_seconds,
            record_ttl_seconds=record_ttl_seconds,
            max_trajectories=max_trajectories,
            max_record_bytes=max_record_bytes,
            records_per_trajectory=4,
            on_removed=self._free_later,
            on_released=self._tell_released,
        )
        self._running: set[asyncio.Task[StepResult]] = set()
        self._freeing: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._started: list[Tool] = []
        self._closing = False

    def __len__(self) -> int:
        """Live trajectories that are remembered."""
        return len(self._table)

    async def start(self) -> None:
        """Start all tools; if one cannot, those that were started are closed again and its error is raised."""
        try:
            for tool in self.tools:
                await tool.start()
                self._started.append(tool)
        except BaseException:
            await self._close_tools()
            raise
        self._sweeper = asyncio.create_task(self._sweep_forever())

    async def close(self, grace_seconds: float = 5.0) -> None:
        """Take nothing new, give what runs `grace_seconds` to end, then free all states and close the tools."""
        self._closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=grace_seconds)
        leftovers = list(self._running)
        for task in leftovers:
            task.cancel()
        await asyncio.gather(*leftovers, return_exceptions=True)
        for trajectory in self._table.clear():
            self._free_later(trajectory)
        if self._freeing:
            await asyncio.wait(self._freeing, timeout=grace_seconds)
        await self._close_tools()

    async def step(
        self,
        requests: Sequence[StepRequest],
        *,
        timeout_seconds: float | None = None,
        admission: Admission | None = None,
    ) -> list[StepResult]:
        """Answer all `requests` in their order, different trajectories at the same time.

        Never raises for a single entry: it gets a fault. What is not ready after `timeout_seconds` is answered with the
        fault ``timeout``; a step that carries a number runs on and can be asked for again. With `admission`, an action
        waits there for a place before it runs.
        """
        if not requests:
            return []
        tasks = [self._track(self._answer(request, admission)) for request in requests]
        try:
            await asyncio.wait(tasks, timeout=timeout_seconds)
        finally:
            for task in tasks:
                task.cancel()
        return [self._outcome(*pair, timeout_seconds) for pair in zip(requests, tasks, strict=True)]

    async def check(self) -> None:
        """Raise a `VerlToolError` if one of the tools can no longer serve."""
        for tool in self.tools:
            await tool.check()

    def describe(self) -> list[ToolDescription]:
        """The tools as ``GET /tools`` tells them."""
        return [tool.describe() for tool in self.tools]

    def tool(self, name: str) -> Tool | None:
        """The tool of that name."""
        return self._by_name.get(name)

    def trajectories(self) -> list[str]:
        """Ids of all live trajectories that are remembered here."""
        return self._table.ids()

    def stats(self) -> ToolSetStats:
        """What is held at this moment."""
        return ToolSetStats(len(self._table), len(self._running), self._table.record_bytes, self._live_by_tool())

    def sweep(self) -> None:
        """Drop what is older than its time to live; the set does so by itself every few seconds."""
        self._table.sweep()

    async def _answer(self, request: StepRequest, admission: Admission | None) -> StepResult:
        try:
            if self._closing:
                raise _stopping()
            if request.finish:
                return await self._finish(request)
            trajectory = self._table.enter(request)
        except ToolFault as fault:
            return self._faulted(request, fault)
        try:
            if request.step is None:
                return await self._run(trajectory, request, [], admission)
            return await self._run_once(trajectory, request, admission)
        except ToolFault as fault:
            return self._faulted(request, fault)
        finally:
            self._table.leave(trajectory)

    async def _run_once(self, trajectory: Trajectory, request: StepRequest, admission: Admission | None) -> StepResult:
        record = self._table.open_record(trajectory, request)
        if record.result is not None:
            return record.result
        if record.task is None:
            record.task = self._track(self._run_recorded(trajectory, request, record, admission))
        return await asyncio.shield(record.task)

    async def _run_recorded(
        self, trajectory: Trajectory, request: StepRequest, record: Record, admission: Admission | None
    ) -> StepResult:
        trajectory.users += 1
        try:
            result = await self._run(trajectory, request, record.progress, admission)
            self._table.close_record(trajectory, request.step or 0, record, result)
        except BaseException:
            record.task = None
            raise
        finally:
            self._table.leave(trajectory)
        return result

    def _track(self, run: Coroutine[Any, Any, StepResult]) -> asyncio.Task[StepResult]:
        task = asyncio.create_task(run)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _run(
        self, trajectory: Trajectory, request: StepRequest, progress: list[ToolResult], admission: Admission | None
    ) -> StepResult:
        """Run the action; a failure becomes the fault of this one result."""
        try:
            return await asyncio.wait_for(
                self._run_in_turn(trajectory, request, progress, admission), self._call_timeout
            )
        except asyncio.TimeoutError:
            fault = ToolFault(
                FaultKind.TIMEOUT,
                f"the action took more than {self._call_timeout:g} s (call_timeout_seconds) and was stopped",
                retryable=False,
            )
        except ToolFault as error:
            fault = error
        # Without a record, a retry would run the action's earlier calls again.
        return self._faulted(request, fault, retryable=fault.retryable and not (progress and request.step is None))

    async def _run_in_turn(
        self, trajectory: Trajectory, request: StepRequest, progress: list[ToolResult], admission: Admission | None
    ) -> StepResult:
        async with trajectory.lock:
            self._refuse_ended(trajectory, request)
            claims, strangers = self._finder.find(request.action, self._wanted_tool(request))
            if claims:
                async with admission.place(claims[0].tool.name) if admission else nullcontext():
                    await self._run_claims(claims, trajectory, request, progress)
                result = merge(request.trajectory_id, claims, progress)
            else:
                self.metrics.not_understood()
                result = not_understood(request.trajectory_id, self.tools, strangers, self._done_if_invalid)
            if result.done:
                trajectory.over = True
                await self._free(trajectory)
            return result

    async def _run_claims(
        self, claims: Sequence[Claim], trajectory: Trajectory, request: StepRequest, progress: list[ToolResult]
    ) -> None:
        """Run the calls that `progress` does not hold yet, up to one that ends the trajectory."""
        for claim in claims[len(progress) :]:
            if progress and progress[-1].done:
                return
            progress.append(await self._run_claim(claim, trajectory, request))

    async def _run_claim(self, claim: Claim, trajectory: Trajectory, request: StepRequest) -> ToolResult:
        tool, call = claim.tool, claim.call
        if call.error is not None:
            self.metrics.not_understood(tool.name)
            return unrunnable(call)
        began = time.perf_counter()
        try:
            result = await tool.run(call, await self._context(tool, trajectory, request))
            if not isinstance(result, ToolResult):
                raise TypeError(f"run returned {type(result).__name__}; a tool returns ToolResult")
        except ToolFault as fault:
            raise _CallFault(tool, fault.kind, fault.message, fault.retryable) from fault
        except SandboxError as error:
            raise _CallFault(tool, FaultKind.SANDBOX, str(error), error.retryable) from error
        except Exception as error:
            # A tool is anybody's code, and may raise anything; what it raises is the fault of this trajectory alone.
            log.exception("tool %s crashed on trajectory %s", tool.name, trajectory.id)
            words = f"tool {tool.name}: {type(error).__name__}: {error}; the traceback is in the server's log"
            raise _CallFault(tool, FaultKind.TOOL_CRASHED, words, retryable=False) from error
        self.metrics.called(tool.name, time.perf_counter() - began, valid=result.valid, error=result.error)
        return result

    async def _context(self, tool: Tool, trajectory: Trajectory, request: StepRequest) -> Context:
        """Who calls `tool`; a state is made at the trajectory's first call."""
        if tool.name not in trajectory.states:
            state = await tool.create_state(trajectory.id, request.extra) if tool.stateful else None
            trajectory.states[tool.name] = state
        state = trajectory.states[tool.name]
        return Context(trajectory.id, request.step, state, request.extra, request.is_last_step)

    def _refuse_ended(self, trajectory: Trajectory, request: StepRequest) -> None:
        """An action that waited for its turn while an earlier one ended the trajectory."""
        if trajectory.over or trajectory.closed:
            message = f"trajectory {request.trajectory_id[:80]!r} ended while this action waited for its turn"
            raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)

    def _wanted_tool(self, request: StepRequest) -> Tool | None:
        name = request.extra.get(TOOL_FIELD)
        if name is None:
            return None
        tool = self._by_name.get(name) if isinstance(name, str) else None
        if tool is None:
            known = ", ".join(tool.name for tool in self.tools)
            message = f"{TOOL_FIELD} {str(name)[:80]!r} is unknown; known: {known}"
            raise ToolFault(FaultKind.BAD_REQUEST, message, retryable=False)
        return tool

    async def _finish(self, request: StepRequest) -> StepResult:
        """Free a trajectory, after what it runs now. Doing so twice, or to an unknown one, is no error."""
        self._table.forget_lost(request.trajectory_id)
        trajectory = self._table.get(request.trajectory_id)
        if trajectory is not None:
            async with trajectory.lock:
                trajectory.over = True
                await self._free(trajectory)
            if not trajectory.closed:
                self._table.remove(trajectory)
        return StepResult(request.trajectory_id, done=True)

    async def _free(self, trajectory: Trajectory) -> None:
        """Close all its states. A tool that fails to is logged: its trajectory is over either way."""
        states, trajectory.states = trajectory.states, {}
        for name, state in states.items():
            if not self._by_name[name].stateful:
                continue
            try:
                await asyncio.wait_for(self._by_name[name].close_state(state), self._call_timeout)
            except Exception:
                # A tool is anybody's code, and may raise anything.
                log.exception("tool %s failed to close the state of trajectory %s", name, trajectory.id)

    def _free_later(self, trajectory: Trajectory) -> None:
        if trajectory.states:
            task = asyncio.create_task(self._free(trajectory))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)

    def _tell_released(self, trajectory_id: str, lost: bool) -> None:
        if self._on_released is not None:
            self._on_released(trajectory_id, lost)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_every)
            self._table.sweep()

    async def _close_tools(self) -> None:
        while self._started:
            tool = self._started.pop()
            try:
                await tool.close()
            except Exception:
                # The other tools are to be closed whatever this one raises.
                log.exception("tool %s failed to close", tool.name)

    def _outcome(
        self, request: StepRequest, task: asyncio.Task[StepResult], timeout_seconds: float | None
    ) -> StepResult:
        if not task.done():
            return self._timed_out(request, timeout_seconds or 0.0)
        if task.cancelled():
            return self._faulted(request, _stopping())
        return task.result()

    def _faulted(self, request: StepRequest, fault: ToolFault, retryable: bool | None = None) -> StepResult:
        self.metrics.faulted(fault.kind, fault.tool if isinstance(fault, _CallFault) else NO_TOOL)
        wire = fault.as_fault() if retryable is None else fault.as_fault().model_copy(update={"retryable": retryable})
        return StepResult(request.trajectory_id, valid=False, fault=wire)

    def _timed_out(self, request: StepRequest, seconds: float) -> StepResult:
        again = "send the same step again to get its answer" if request.step is not None else "it was stopped"
        message = f"no answer within {seconds:g} s; {again}"
        return self._faulted(request, ToolFault(FaultKind.TIMEOUT, message, retryable=request.step is not None))

    def _live_by_tool(self) -> dict[str, int]:
        return self._table.count_by_tool([tool.name for tool in self.tools])


def _stopping() -> ToolFault:
    return ToolFault(FaultKind.SHUTTING_DOWN, "the server is stopping; send it to another", retryable=True)


def _refuse_bad_options(
    tools: Sequence[Tool], state_ttl: float, record_ttl: float, max_trajectories: int, call_timeout: float
) -> None:
    if not tools:
        raise ConfigError("no tool is given; name at least one")
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"tool {twice[0]!r} is given twice; name each tool once")
    limits = {
        "state_ttl_seconds": state_ttl,
        "record_ttl_seconds": record_ttl,
        "max_trajectories": max_trajectories,
        "call_timeout_seconds": call_timeout,
    }
    for name, value in limits.items():
        if not value > 0:
            raise ConfigError(f"{name} is {value}; it must be above 0")
