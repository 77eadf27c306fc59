"""The table of a replica's trajectories: their states, and the answers to their latest steps.

This module only keeps data: it never waits, runs a tool or closes a state. A callback receives each removed trajectory
and closes its states. Three limits always hold: the number of trajectories, the bytes of recorded answers, and the
number of trajectories recorded as lost. The least recently used is removed first.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_tool.content.parts import encoded_bytes
from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind, StepRequest, StepResult
from verl_tool.servers.tools.base import ToolResult

_RECORD_OVERHEAD_BYTES = 600
"""Approximate size of a record's Python objects without its texts."""


@dataclass(slots=True)
class TrajectoryEntry:
    """The record of one step of one trajectory, because of which a repeated step runs only once."""

    fingerprint: int
    """Hash of the action. The same step with another action is a mistake of the caller and not a retry."""
    task: asyncio.Task[StepResult] | None = None
    """The run in progress."""
    progress: list[ToolResult] = field(default_factory=list)
    """Results of the action's calls before a retryable fault. A retry continues after them."""
    result: StepResult | None = None
    """The answer, once there is one."""
    size: int = 0
    """Approximate size in bytes."""
    finished: float = 0.0
    """Time of the answer in seconds, on the monotonic clock."""


@dataclass(slots=True)
class ServedTrajectory:
    """A live trajectory."""

    id: str
    last_used: float
    """Time of the last use in seconds, on the monotonic clock."""
    states: dict[str, Any] = field(default_factory=dict)
    """States by the names of the tools that were called; None for a stateless tool."""
    records: dict[int, TrajectoryEntry] = field(default_factory=dict)
    """Records by step."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that is held while one of the trajectory's actions runs."""
    highest_step: int = -1
    users: int = 0
    """Number of requests that use the trajectory. It is only removed at 0."""
    entered: int = 0
    """Number of steps that were ever sent to the trajectory."""
    forked_from: tuple[str, int] | None = None
    """The trajectory from which the states were copied, and its value of `entered` at that time."""
    whole: bool = True
    """False while the states of the original are being copied."""
    over: bool = False
    """Whether a tool has ended the trajectory. Its states are freed, but its last answers are still recorded."""
    closed: bool = False
    """Whether the trajectory was removed from the table."""
    num_waits: int = 0
    """Above 0 while its action waits in a queue of this machine (`util.slots`)."""

    def pause(self) -> None:
        """Its action begins to wait."""
        self.num_waits += 1

    def resume(self) -> None:
        """Its action has a slot."""
        self.num_waits -= 1


class TrajectoryTable:
    """All live trajectories of one replica.

    If `stateful`, an unknown trajectory beyond step 0 is rejected with ``state_lost``, since it had its state elsewhere
    or long ago. `on_removed` is called with each removed trajectory.
    """

    def __init__(
        self,
        *,
        stateful: bool,
        state_ttl_seconds: float,
        record_ttl_seconds: float,
        max_trajectories: int,
        max_record_bytes: int,
        records_per_trajectory: int,
        on_removed: Callable[[ServedTrajectory], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stateful = stateful
        self._state_ttl = state_ttl_seconds
        self._record_ttl = record_ttl_seconds
        self._max_trajectories = max_trajectories
        self._max_record_bytes = max_record_bytes
        self._records_per_trajectory = records_per_trajectory
        self._on_removed = on_removed
        self._clock = clock
        self._live: OrderedDict[str, ServedTrajectory] = OrderedDict()
        self._answered: OrderedDict[tuple[str, int], TrajectoryEntry] = OrderedDict()
        self._lost: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self.record_bytes = 0

    def __len__(self) -> int:
        return len(self._live)

    def ids(self) -> list[str]:
        """Ids of all live trajectories."""
        return list(self._live)

    def count_by_tool(self, names: Sequence[str]) -> dict[str, int]:
        """How many live trajectories have called each tool of `names`."""
        counts = dict.fromkeys(names, 0)
        for trajectory in self._live.values():
            for name in trajectory.states:
                counts[name] += 1
        return counts

    def unfinished(self) -> int:
        """Live trajectories that run an action or hold a state of their own: what would be lost with this replica."""
        return sum(
            trajectory.users > 0 or any(state is not None for state in trajectory.states.values())
            for trajectory in self._live.values()
            if not trajectory.over
        )

    def get(self, trajectory_id: str) -> ServedTrajectory | None:
        """Return the live trajectory with that id, without marking it as used."""
        return self._live.get(trajectory_id)

    def knows(self, trajectory_id: str) -> bool:
        """Return whether a trajectory is live here, or recorded as lost."""
        lost = self._lost.get(trajectory_id)
        return trajectory_id in self._live or (lost is not None and lost[1] >= self._clock())

    def enter(self, request: StepRequest) -> ServedTrajectory:
        """Return the trajectory of `request`, and create it if possible. `leave` it afterwards.

        Raises ToolFault: ``state_lost`` if its state is lost, ``overloaded`` if the table is full.
        """
        trajectory = self._unexpired(request.trajectory_id)
        if trajectory is not None and trajectory.over and not self._repeats(trajectory, request):
            self._evict_finished(trajectory, request)
            trajectory = None
        if trajectory is None:
            trajectory = self._create(request)
        trajectory.entered += 1
        self._use(trajectory)
        return trajectory

    def enter_fork(self, source_id: str, new_id: str) -> tuple[ServedTrajectory, ServedTrajectory]:
        """Return a live trajectory, and a new one without states that continues its steps. `leave` both afterwards.

        If the new one already exists as a fork of the same trajectory, and nothing was sent to either since, this is a
        repeated request for the same fork.

        Raises ToolFault: ``state_lost`` if the first is unknown, ``bad_request`` if the second id is in use,
        ``overloaded`` if the table is full.
        """
        source = self._unexpired(source_id)
        if source is None or source.over:
            raise ToolFault(
                FaultKind.STATE_LOST,
                f"trajectory {source_id[:80]!r} cannot be forked: {self._loss_reason(source_id)}",
                retryable=False,
                trajectory_id=source_id,
            )
        self._use(source)
        try:
            branch = self._branch(source, new_id)
        except ToolFault:
            self.leave(source)
            raise
        self._use(branch)
        return source, branch

    def leave(self, trajectory: ServedTrajectory) -> None:
        """Release a trajectory of `enter`. A stateless trajectory without a record is removed at once."""
        trajectory.users -= 1
        trajectory.last_used = self._clock()
        if not trajectory.closed and self._is_nothing(trajectory):
            self.remove(trajectory)

    def open_record(self, trajectory: ServedTrajectory, request: StepRequest) -> TrajectoryEntry:
        """Return the record of the request's step, and create it if the step is new.

        Raises ToolFault ``bad_request`` if the step was run with another action, or its record was dropped.
        """
        step, fingerprint = request.step or 0, hash(request.action)
        record = trajectory.records.get(step)
        if record is None:
            if step <= trajectory.highest_step:
                raise _bad_request(request, _why_forgotten(trajectory, step))
            record = trajectory.records[step] = TrajectoryEntry(fingerprint)
            trajectory.highest_step = step
        elif record.fingerprint != fingerprint:
            raise _bad_request(
                request,
                f"step {step} was sent before with another action; give each trajectory an id of its own, "
                "or send it with finish=true before its id is used again",
            )
        return record

    def close_record(
        self, trajectory: ServedTrajectory, step: int, record: TrajectoryEntry, result: StepResult
    ) -> None:
        """Remember `result` as the answer to the step, unless the step may be run again."""
        record.task = None
        if result.fault is not None and result.fault.retryable:
            return
        record.result, record.progress = result, []
        record.size, record.finished = _size_of(result), self._clock()
        if trajectory.closed:
            return
        self._answered[trajectory.id, step] = record
        self.record_bytes += record.size
        while len(trajectory.records) > self._records_per_trajectory:
            oldest = next(iter(trajectory.records))
            if trajectory.records[oldest].task is not None:
                break
            self._forget_record(trajectory.id, oldest)
        while self.record_bytes > self._max_record_bytes and len(self._answered) > 1:
            self._forget_record(*next(iter(self._answered)))

    def remove(self, trajectory: ServedTrajectory, lost_because: str | None = None) -> None:
        """Take it out. With `lost_because`, a state that it had is remembered as lost."""
        del self._live[trajectory.id]
        trajectory.closed = True
        for step in list(trajectory.records):
            self._forget_record(trajectory.id, step, trajectory)
        if lost_because is not None and self._stateful and trajectory.states:
            self._lost[trajectory.id] = (lost_because, self._clock() + self._state_ttl)
            while len(self._lost) > self._max_trajectories:
                self._lost.popitem(last=False)
        self._on_removed(trajectory)

    def forget_lost(self, trajectory_id: str) -> None:
        """Its caller has finished it: nobody will ask for the lost state again."""
        self._lost.pop(trajectory_id, None)

    def sweep(self) -> None:
        """Drop what is older than its time to live. Takes time in proportion to what it drops."""
        now = self._clock()
        while self._answered:
            (trajectory_id, step), record = next(iter(self._answered.items()))
            if now - record.finished < self._record_ttl:
                break
            self._forget_record(trajectory_id, step)
            trajectory = self._live[trajectory_id]
            if self._is_nothing(trajectory):
                self.remove(trajectory)
        while self._live:
            trajectory = next(iter(self._live.values()))
            if now - trajectory.last_used < self._state_ttl:
                break
            if trajectory.users:
                trajectory.last_used = now
                self._live.move_to_end(trajectory.id)
                continue
            self.remove(trajectory, lost_because=f"it was idle for more than {self._state_ttl:g} s")
        while self._lost and next(iter(self._lost.values()))[1] < now:
            self._lost.popitem(last=False)

    def clear(self) -> list[ServedTrajectory]:
        """Take all out without a word to anybody: the server stops."""
        trajectories = list(self._live.values())
        for trajectory in trajectories:
            trajectory.closed = True
        self._live.clear()
        self._answered.clear()
        self.record_bytes = 0
        return trajectories

    def _use(self, trajectory: ServedTrajectory) -> None:
        trajectory.users += 1
        trajectory.last_used = self._clock()
        self._live.move_to_end(trajectory.id)

    def _branch(self, source: ServedTrajectory, new_id: str) -> ServedTrajectory:
        branch, point = self._live.get(new_id), (source.id, source.entered)
        if branch is not None and branch.forked_from == point and not branch.entered:
            return branch
        request = StepRequest(new_id, "")
        if branch is not None or new_id in self._lost:
            raise _bad_request(request, "the id is in use; give the new trajectory one that was never used")
        branch = self._create(request)
        branch.forked_from, branch.highest_step, branch.whole = point, source.highest_step, False
        return branch

    def _loss_reason(self, trajectory_id: str) -> str:
        reason = self._lost.get(trajectory_id)
        if reason is not None and reason[1] >= self._clock():
            return f"its state is lost, for {reason[0]}"
        return "this replica does not know it; it has called no tool, its replica is gone, or it has ended"

    def _unexpired(self, trajectory_id: str) -> ServedTrajectory | None:
        """The live trajectory of that id; it is removed if it was idle for too long."""
        trajectory = self._live.get(trajectory_id)
        if trajectory is None or trajectory.users or self._clock() - trajectory.last_used < self._state_ttl:
            return trajectory
        self.remove(trajectory, lost_because=f"it was idle for more than {self._state_ttl:g} s")
        return None

    def _is_nothing(self, trajectory: ServedTrajectory) -> bool:
        """Whether nobody is in it and there is nothing to remember."""
        return not trajectory.users and not trajectory.records and (trajectory.over or not self._stateful)

    def _repeats(self, trajectory: ServedTrajectory, request: StepRequest) -> bool:
        record = trajectory.records.get(request.step) if request.step is not None else None
        return record is not None and record.fingerprint == hash(request.action)

    def _evict_finished(self, trajectory: ServedTrajectory, request: StepRequest) -> None:
        """Take out a trajectory that is over, because a new one begins under its id."""
        if request.step or trajectory.users:
            raise _bad_request(request, f"it is over since step {trajectory.highest_step}; begin a new one at step 0")
        self.remove(trajectory)

    def _create(self, request: StepRequest) -> ServedTrajectory:
        if self._stateful:
            self._reject_lost(request)
        if len(self._live) >= self._max_trajectories:
            self._evict_one()
        trajectory = ServedTrajectory(request.trajectory_id, self._clock())
        self._live[trajectory.id] = trajectory
        return trajectory

    def _reject_lost(self, request: StepRequest) -> None:
        reason = self._lost.get(request.trajectory_id)
        if reason is not None and reason[1] >= self._clock():
            because = reason[0]
        elif request.step or request.begun:
            because = "it has begun and this replica does not know it; its replica is gone, or it was finished"
        else:
            return
        raise ToolFault(
            FaultKind.STATE_LOST,
            f"the state of trajectory {request.trajectory_id[:80]!r} is lost: {because}; start it again as a new one",
            retryable=False,
            trajectory_id=request.trajectory_id,
        )

    def _evict_one(self) -> None:
        """Take out the least recently used idle trajectory."""
        for _ in range(len(self._live)):
            trajectory = next(iter(self._live.values()))
            if trajectory.users == 0:
                because = f"the replica holds {self._max_trajectories} trajectories and it was the longest idle one"
                self.remove(trajectory, lost_because=because)
                return
            self._live.move_to_end(trajectory.id)
        raise ToolFault(
            FaultKind.OVERLOADED,
            f"all {self._max_trajectories} trajectories that this replica may hold are busy; send it again later",
            retryable=True,
        )

    def _forget_record(self, trajectory_id: str, step: int, trajectory: ServedTrajectory | None = None) -> None:
        owner = trajectory or self._live[trajectory_id]
        record = owner.records.pop(step)
        if self._answered.pop((trajectory_id, step), None) is not None:
            self.record_bytes -= record.size


def _why_forgotten(trajectory: ServedTrajectory, step: int) -> str:
    if trajectory.forked_from is not None and not trajectory.records:
        return (
            f"step {step} was run before it was forked from {trajectory.forked_from[0][:80]!r}; its steps go on from "
            f"{trajectory.highest_step + 1}"
        )
    return (
        f"step {step} is forgotten: step {trajectory.highest_step} has been sent since; "
        "send each step once more at most while no later one is sent"
    )


def _bad_request(request: StepRequest, message: str) -> ToolFault:
    return ToolFault(
        FaultKind.BAD_REQUEST,
        f"trajectory {request.trajectory_id[:80]!r}: {message}",
        retryable=False,
        trajectory_id=request.trajectory_id,
    )


def _size_of(result: StepResult) -> int:
    texts = (result.trajectory_id, result.observation, result.invalid_reason or "")
    media = encoded_bytes(result.image) + encoded_bytes(result.audio)
    opening = 0 if result.opening is None else len(result.opening.model_dump_json())
    return _RECORD_OVERHEAD_BYTES + sum(map(len, texts)) + media + opening
