"""Serve the tools of one replica: order of actions, state of trajectories, and running every step exactly once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from verl_tool.errors import ConfigError, ToolFault
from verl_tool.http.metrics import ToolMetrics
from verl_tool.protocol import ABORT_FIELD, Fault, FaultKind, StepRequest, StepResult, ToolDescription
from verl_tool.servers.execution.action_runner import ActionRunner
from verl_tool.servers.execution.admission import Admission
from verl_tool.servers.execution.trajectory_table import ServedTrajectory, TrajectoryEntry, TrajectoryTable
from verl_tool.servers.execution.wait_all import wait_all
from verl_tool.servers.tools.base import Tool

log = logging.getLogger(__name__)

FORK = "fork"
"""Replaces the tool's name while a fork waits for a slot."""
_ABANDONED_SECONDS = 60.0
"""After which a run that waits in a queue is cancelled if its answer is not requested again."""
_BEGIN_AT_A_TIME = 128
"""Number of entries of a batch to start before the event loop runs other work."""


class ToolSet:
    """Serves the actions of many trajectories with several tools.

    The calls of an action are found in the formats of all tools and run in the order of the text. Their observations
    are joined, each rendered in the format of its call. Actions of one trajectory run one after the other, those of
    different trajectories concurrently.

    A request with a step is run exactly once, and its answer is recorded. If it is sent again, it is answered from the
    record or waits for the run in progress. If the caller disconnects, a run with a step continues, and a run without
    one is cancelled.

    `state_ttl_seconds` is the idle time after which a trajectory's state is freed, and `record_ttl_seconds` the time
    for which answers are recorded. `call_timeout_seconds` is the deadline of one action, including the wait for those
    before it of the same trajectory, and not the wait in a queue of this machine (`util.slots`). `max_calls` limits the
    calls per action, to `MAX_CALLS` by default and at most.
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
        max_calls: int | None = None,
    ) -> None:
        _validate_options(tools, state_ttl_seconds, record_ttl_seconds, max_trajectories, call_timeout_seconds)
        self.tools = tuple(tools)
        self.stateful = any(tool.stateful for tool in tools)
        self.metrics = ToolMetrics([tool.name for tool in tools])
        self.metrics.add_gauge(
            "verl_tool_live_trajectories", "Live trajectories that have called the tool.", self._live_by_tool
        )
        self._by_name = {tool.name: tool for tool in self.tools}
        self._runner = ActionRunner(
            self.tools,
            self.metrics,
            done_if_invalid=done_if_invalid,
            max_calls=max_calls,
            call_timeout_seconds=call_timeout_seconds,
        )
        lives = [state_ttl_seconds, record_ttl_seconds, *(tool.ttl_seconds for tool in tools if tool.ttl_seconds)]
        self._sweep_every = min(30.0, min(lives) / 4)
        self._table = TrajectoryTable(
            stateful=self.stateful,
            state_ttl_seconds=state_ttl_seconds,
            record_ttl_seconds=record_ttl_seconds,
            max_trajectories=max_trajectories,
            max_record_bytes=max_record_bytes,
            records_per_trajectory=4,
            on_removed=self._free_later,
        )
        self._running: set[asyncio.Task[StepResult]] = set()
        self._queued: dict[asyncio.Task[StepResult], tuple[float, StepRequest]] = {}
        """Runs whose answer is not requested again yet, with the time of the last request's end."""
        self._freeing: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._started: list[Tool] = []
        self._closing = False

    def __len__(self) -> int:
        """Number of live trajectories in the table."""
        return len(self._table)

    async def start(self) -> None:
        """Start all tools. If one fails, close those that were started and raise its error."""
        try:
            for tool in self.tools:
                await tool.start()
                self._started.append(tool)
        except BaseException:
            await self._close_tools()
            raise
        self._sweeper = asyncio.create_task(self._sweep_forever())

    async def close(self, grace_seconds: float = 5.0) -> None:
        """Reject new requests, wait `grace_seconds` for running ones, then free all states and close the tools."""
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
        hold_seconds: float | None = None,
        admission: Admission | None = None,
    ) -> list[StepResult]:
        """Answer `requests` in their order. Different trajectories run concurrently.

        The failure of an entry is the fault of its answer and is not raised. After `timeout_seconds`, the answer is the
        fault ``timeout``. A step that has a number continues then, and its answer can be requested again. After
        `hold_seconds`, steps with numbers are answered with the fault ``queued`` if one of them still waits in a queue
        of this machine (`util.slots`), and keep their places. With `admission`, an action waits there for a slot before
        it runs.
        """
        if not requests:
            return []
        started: list[asyncio.Task[StepResult] | StepResult] = []
        runs: dict[asyncio.Task[StepResult], StepRequest] = {}
        try:
            for number, request in enumerate(requests, 1):
                started.append(self._begin(request, admission))
                if number % _BEGIN_AT_A_TIME == 0:
                    await asyncio.sleep(0)
            runs = {
                run: request for request, run in zip(requests, started, strict=True) if isinstance(run, asyncio.Task)
            }
            is_held = await self._wait(runs, timeout_seconds, hold_seconds)
        finally:
            now = time.monotonic()
            self._queued |= {run: (now, each) for run, each in runs.items() if not run.done() and each.step is not None}
            for request, run in zip(requests, started, strict=False):
                if isinstance(run, asyncio.Task) and request.step is None and not request.finish:
                    run.cancel()
        return [self._answer(*pair, timeout_seconds, is_held) for pair in zip(requests, started, strict=True)]

    async def fork(
        self,
        trajectory_id: str,
        new_trajectory_id: str,
        *,
        timeout_seconds: float | None = None,
        admission: Admission | None = None,
    ) -> StepResult:
        """Make a trajectory with copies of all states of another one, after the action in progress.

        A repeated request returns the same fork, as long as nothing was sent to either trajectory. A failure is the
        fault of the result, and the new trajectory does not exist then: ``not_forkable`` if a tool cannot copy its
        state, ``state_lost`` if the first trajectory is unknown, ``bad_request`` if the new one exists already. If no
        tool has state, a fork does nothing and always succeeds.
        """
        request = StepRequest(new_trajectory_id, "")
        if self._closing:
            return self._runner.answer_fault(request, _stopping())
        run = self._spawn(self._fork(trajectory_id, request, admission))
        try:
            await wait_all({run}, timeout_seconds)
        finally:
            run.cancel()
        if not run.done():
            words = f"the fork took more than {timeout_seconds or 0.0:g} s and was stopped"
            return self._runner.answer_fault(request, ToolFault(FaultKind.TIMEOUT, words, retryable=True))
        return self._runner.answer_fault(request, _stopping()) if run.cancelled() else run.result()

    async def check(self) -> None:
        """Raise VerlToolError if one of the tools can no longer serve."""
        for tool in self.tools:
            await tool.check()

    def describe(self) -> list[ToolDescription]:
        """Describe the tools as in the answer of ``GET /tools``."""
        return [tool.describe() for tool in self.tools]

    def tool(self, name: str) -> Tool | None:
        """Return the tool of that name, None if there is none."""
        return self._by_name.get(name)

    def trajectories(self) -> list[str]:
        """Return the ids of all live trajectories in the table."""
        return self._table.ids()

    def knows(self, trajectory_id: str) -> bool:
        """Return whether the table contains the trajectory, or the reason why its state was lost."""
        return self._table.knows(trajectory_id)

    def unfinished(self) -> int:
        """Return the number of trajectories whose state would be lost if this replica exited now."""
        return self._table.unfinished()

    def sweep(self) -> None:
        """Remove what exceeded its time to live, and end what waits in a queue and nobody requests. A task calls this
        every few seconds."""
        oldest = time.monotonic() - _ABANDONED_SECONDS
        for run, (at, request) in list(self._queued.items()):
            if at < oldest and self._is_queued(request):
                run.cancel()
        self._table.sweep()
        for trajectory, because in self._runner.expired():
            if not trajectory.closed:
                self._table.remove(trajectory, lost_because=because)

    def _begin(self, request: StepRequest, admission: Admission | None) -> asyncio.Task[StepResult] | StepResult:
        """Start the task that answers `request`, or return the answer if no task is needed.

        Everything else happens immediately, so that a batch needs one task per entry and the entries of a trajectory
        keep their order.
        """
        trajectory = record = None
        try:
            if self._closing:
                raise _stopping()
            if request.finish:
                return self._spawn(self._finish(request))
            trajectory = self._table.enter(request)
            if request.step is not None:
                record = self._table.open_record(trajectory, request)
        except ToolFault as fault:
            if trajectory is not None:
                self._table.leave(trajectory)
            return self._runner.answer_fault(request, fault)
        if record is None or (record.result is None and record.task is None):
            return self._spawn_run(trajectory, request, record, admission)
        self._table.leave(trajectory)
        if record.task is not None:
            self._queued.pop(record.task, None)
        return record.result or record.task or self._runner.answer_fault(request, _stopping())

    def _spawn_run(
        self,
        trajectory: ServedTrajectory,
        request: StepRequest,
        record: TrajectoryEntry | None,
        admission: Admission | None,
    ) -> asyncio.Task[StepResult]:
        """Run the action in a task that leaves the trajectory, even if it is cancelled before it starts."""
        task = self._spawn(self._run(trajectory, request, record, admission))

        def leave(_: asyncio.Task[StepResult]) -> None:
            if record is not None:
                record.task = None
            self._table.leave(trajectory)

        task.add_done_callback(leave)
        if record is not None:
            record.task = task
        return task

    async def _run(
        self,
        trajectory: ServedTrajectory,
        request: StepRequest,
        record: TrajectoryEntry | None,
        admission: Admission | None,
    ) -> StepResult:
        if record is None:
            return await self._runner.run(trajectory, request, [], admission)
        result = await self._runner.run(trajectory, request, record.progress, admission)
        self._table.close_record(trajectory, request.step or 0, record, result)
        return result

    async def _finish(self, request: StepRequest) -> StepResult:
        """Free a trajectory, after the action in progress. A trajectory that is unknown or freed already is no error.

        With `ABORT_FIELD` in the extra data, the action in progress is cancelled, as is one that waits in a queue.
        """
        self._table.forget_lost(request.trajectory_id)
        trajectory = self._table.get(request.trajectory_id)
        if trajectory is not None:
            if request.extra.get(ABORT_FIELD) or trajectory.num_waits:
                for record in trajectory.records.values():
                    if record.task is not None:
                        record.task.cancel()
            await self._runner.end(trajectory)
            if not trajectory.closed:
                self._table.remove(trajectory)
        return StepResult(request.trajectory_id, done=True)

    async def _fork(self, source_id: str, request: StepRequest, admission: Admission | None) -> StepResult:
        try:
            if self.stateful:
                while not await self._copy_or_wait(source_id, request.trajectory_id, admission):
                    pass
            return StepResult(request.trajectory_id)
        except ToolFault as fault:
            return self._runner.answer_fault(request, fault)

    async def _copy_or_wait(self, source_id: str, new_id: str, admission: Admission | None) -> bool:
        """Make the fork, or wait for another request that makes it. Returns False if that one failed."""
        source, branch = self._table.enter_fork(source_id, new_id)
        try:
            async with branch.lock:
                if not branch.whole and not branch.closed:
                    await self._copy(source, branch, admission)
                return branch.whole
        finally:
            self._table.leave(source)
            self._table.leave(branch)

    async def _copy(self, source: ServedTrajectory, branch: ServedTrajectory, admission: Admission | None) -> None:
        try:
            async with admission.place(FORK) if admission else nullcontext():
                await self._runner.fork(source, branch)
            branch.whole = True
        except BaseException:
            branch.over = True
            if not branch.closed:
                self._table.remove(branch)
            raise

    def _spawn(self, run: Coroutine[Any, Any, StepResult]) -> asyncio.Task[StepResult]:
        task = asyncio.create_task(run)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: self._queued.pop(task, None) and None)
        return task

    def _free_later(self, trajectory: ServedTrajectory) -> None:
        if any(self._by_name[name].stateful for name in trajectory.states):
            task = asyncio.create_task(self._runner.free(trajectory))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_every)
            self.sweep()

    async def _close_tools(self) -> None:
        while self._started:
            tool = self._started.pop()
            try:
                await tool.close()
            except Exception:
                # Tools are users' code. The other tools are closed whatever this one raises.
                log.exception("tool %s failed to close", tool.name)

    async def _wait(
        self, runs: Mapping[asyncio.Task[StepResult], StepRequest], seconds: float | None, hold_seconds: float | None
    ) -> bool:
        """Wait until all runs are done, `seconds` have passed, or, after each `hold_seconds`, only runs of numbered
        steps are left of which one waits in a queue. Return whether it was the last."""
        remaining, undone = seconds, list(runs)
        while undone:
            part = min((limit for limit in (remaining, hold_seconds) if limit is not None), default=None)
            await wait_all(undone, part)
            undone = [run for run in undone if not run.done()]
            remaining = None if remaining is None or part is None else remaining - part
            if remaining is not None and remaining <= 0:
                return False
            requests = [runs[run] for run in undone]
            if all(request.step is not None for request in requests) and any(map(self._is_queued, requests)):
                return True
        return False

    def _answer(
        self,
        request: StepRequest,
        run: asyncio.Task[StepResult] | StepResult,
        timeout_seconds: float | None,
        is_held: bool,
    ) -> StepResult:
        if isinstance(run, StepResult):
            return run
        if not run.done() and request.step is not None and (is_held or self._is_queued(request)):
            message = "the step, or one of the same request, waits in a queue of the server; send it again"
            fault = Fault(kind=FaultKind.QUEUED, message=message, retryable=True)
            return StepResult(request.trajectory_id, valid=False, fault=fault)
        if not run.done():
            return self._timed_out(request, timeout_seconds or 0.0)
        return self._runner.answer_fault(request, _stopping()) if run.cancelled() else run.result()

    def _is_queued(self, request: StepRequest) -> bool:
        trajectory = self._table.get(request.trajectory_id)
        return trajectory is not None and trajectory.num_waits > 0

    def _timed_out(self, request: StepRequest, seconds: float) -> StepResult:
        again = "send the same step again to get its answer" if request.step is not None else "it was stopped"
        message = f"no answer within {seconds:g} s; {again}"
        return self._runner.answer_fault(
            request, ToolFault(FaultKind.TIMEOUT, message, retryable=request.step is not None)
        )

    def _live_by_tool(self) -> dict[str, int]:
        return self._table.count_by_tool([tool.name for tool in self.tools])


def _stopping() -> ToolFault:
    return ToolFault(FaultKind.SHUTTING_DOWN, "the server is stopping; send it to another", retryable=True)


def _validate_options(
    tools: Sequence[Tool], state_ttl: float, record_ttl: float, max_trajectories: int, call_timeout: float
) -> None:
    if not tools:
        raise ConfigError("no tool is given; name at least one")
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"tool {twice[0]!r} is given twice; name each tool once")
    for one, other in itertools.combinations(tools, 2):
        one.reject_alongside(other)
    limits = {
        "state_ttl_seconds": state_ttl,
        "record_ttl_seconds": record_ttl,
        "max_trajectories": max_trajectories,
        "call_timeout_seconds": call_timeout,
    }
    for name, value in limits.items():
        if not value > 0:
            raise ConfigError(f"{name} is {value}; it must be above 0")
