"""Manage the sessions of a pool: their number, their forkservers, and the end of idle ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_tool.errors import IsolationError, SandboxError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.sandbox.isolation.cgroup import group_bytes
from verl_tool.sandbox.isolation.levels import Level
from verl_tool.sandbox.limits import SessionLimits
from verl_tool.sandbox.session.session import Session
from verl_tool.sandbox.worker import MAX_SESSION_SLOTS, Worker, WorkerSetup

if TYPE_CHECKING:
    from verl_tool.sandbox.isolation.cgroup import RunGroup
    from verl_tool.sandbox.limit_enforcer import LimitEnforcer
    from verl_tool.sandbox.result import CellResult
    from verl_tool.sandbox.run_queue import RunSlots

MAX_SESSIONS = 1024
"""Maximum number of sessions in one worker, since the forkserver needs descriptors for each."""
_SLOTS_PER_SESSION = 3
"""Slots for the folders, the interpreter and a command. A session may use unused slots of others."""
_COMPANIONS = 64
"""Maximum number of companions of sessions (`Session.companion`). Further ones wait."""
_MONITOR_SECONDS = 0.2
_MEASURED_AT_ONCE = 50
"""Number of sessions whose memory is measured before the event loop runs other work."""
_GROUPS_OPEN = 100
"""Maximum number of sessions for which the files of control groups stay open."""


class SessionPool:
    """The sessions of one sandbox pool."""

    def __init__(
        self,
        setup: WorkerSetup,
        run_slots: RunSlots,
        enforcer: LimitEnforcer,
        *,
        workers: int,
        max_sessions: int,
        memory_bytes: int,
        fair_share: int,
    ) -> None:
        """Store the settings. A forkserver is started by `warm`, or for the first session.

        `setup` is that of the pool's workers. Sessions have workers of their own, at most `workers`. Each call waits
        for a slot in `run_slots`. `memory_bytes` is the maximum memory of all sessions together, as counted by control
        groups, beyond which the largest ones are ended (`enforce_memory`). For `fair_share` see `oom_kills`.
        """
        # One more, for `run_isolated`.
        slots = min(MAX_SESSION_SLOTS, _SLOTS_PER_SESSION * (min(max_sessions, MAX_SESSIONS) + _COMPANIONS + 1))
        self._setup = replace(setup, sessions=True, slots=slots)
        self.run_slots, self.fair_share = run_slots, fair_share
        self._enforcer = enforcer
        self._max_workers, self._max_sessions = workers, min(max_sessions, workers * MAX_SESSIONS)
        self._memory_bytes = memory_bytes
        self._sessions: dict[Session, None] = {}
        self._uncounted: set[Session] = set()
        """Sessions of `run_isolated`, and companions."""
        self.companions = asyncio.Semaphore(_COMPANIONS)
        self._workers: list[Worker] = []
        self._starting = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    @property
    def live(self) -> int:
        return len(self._sessions)

    async def warm(self) -> None:
        """Start the first forkserver. Raises IsolationError, SandboxError."""
        self._require_isolation()
        await self.worker()

    def _require_isolation(self) -> None:
        if self._setup.isolation.level is Level.none:
            raise IsolationError(
                "sessions need the isolation level 'full': without pid namespaces, processes of a session could not be "
                f"ended. {self._setup.isolation.missing}"
            )

    def new(self, limits: SessionLimits, files: Mapping[str, bytes]) -> Session:
        """Make a session without starting it. Raises IsolationError at the isolation level ``none``."""
        self._require_isolation()
        return Session(self, limits, files)

    async def run_isolated(self, code: str) -> CellResult:
        """Run a cell in a session that is not counted. Raises IsolationError, SandboxError."""
        try:
            async with self.uncounted(SessionLimits()) as session:
                return await session.run(code)
        except ToolFault as error:
            raise SandboxError(error.message, retryable=True) from error

    @contextlib.asynccontextmanager
    async def uncounted(self, limits: SessionLimits) -> AsyncIterator[Session]:
        """Start a session that does not count towards the maximum, and that only its own limits can end.

        Raises the errors of `Session.start`, except that for too many sessions.
        """
        session = self.new(limits, {})
        self._uncounted.add(session)
        try:
            async with session:
                yield session
        finally:
            self._uncounted.discard(session)

    async def close(self) -> None:
        """End all sessions and their forkservers."""
        if self._watch is not None:
            self._watch.cancel()
        for session in tuple(self._sessions):
            session.evict("the sandbox was closed")
            self.close_soon(session.close())  # also one that is being evicted after its call
        while self._ending:
            await asyncio.wait(self._ending)
        await asyncio.gather(*(worker.close() for worker in self._workers))

    # Methods that sessions call:

    def admit(self, session: Session) -> None:
        """Add a session. Raises ToolFault ``overloaded`` if there are too many."""
        if session in self._uncounted:
            return
        if len(self._sessions) >= self._max_sessions:
            limit = self._max_sessions
            message = f"there are {limit} sessions already, the limit max_sessions; try again later, or raise it"
            raise ToolFault(FaultKind.OVERLOADED, message, retryable=True)
        self._sessions[session] = None
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._monitor())

    def forget(self, session: Session) -> None:
        """Remove a session that has ended."""
        self._sessions.pop(session, None)

    def close_soon(self, closing: Coroutine[Any, Any, None]) -> None:
        """Close a session in a task of its own."""
        task = asyncio.get_running_loop().create_task(closing)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def worker(self) -> Worker:
        """Return the forkserver for a new session. Raises SandboxError if none could be started."""
        async with self._starting:
            self._workers = [worker for worker in self._workers if worker.alive]
            fewest = min(self._workers, key=lambda worker: worker.live, default=None)
            if fewest is None or (fewest.live and len(self._workers) < self._max_workers):
                fewest = Worker(self._setup, self._reap)
                try:
                    await fewest.start()
                except IsolationError as error:
                    raise SandboxError(str(error), retryable=True) from error
                self._workers.append(fewest)
            return fewest

    def _reap(self, worker: Worker) -> None:
        self.close_soon(worker.close())
        for session in tuple(self._sessions):
            session.worker_died(worker)

    def take_group(self, worker: Worker, limits: SessionLimits) -> RunGroup | None:
        """Take a control group for a session, None if there are no groups."""
        group = self._setup.group
        return group.take(group_bytes(worker.resident_bytes, limits)) if group is not None else None

    def give_group(self, group: RunGroup, *, gone: bool) -> None:
        assert self._setup.group is not None
        self._setup.group.give(group, gone=gone)

    def enforced(
        self, group: RunGroup | None, limits: SessionLimits, kill: Callable[[int], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Enforce limits as `LimitEnforcer.enforced` does. Without control groups, the forkserver does so."""
        return contextlib.nullcontext() if group is None else self._enforcer.enforced(group, limits, kill)

    def measured(self, group: RunGroup) -> None:
        """Close the files of a session's control group after it read them, if there are many sessions."""
        if len(self._sessions) > _GROUPS_OPEN:
            group.close_files()

    def enforce_memory(self) -> None:
        """End sessions while all together exceed the memory limit, by their latest measurements.

        The largest sessions are ended first, and none that uses no more than its share. The fault counts as caused by
        the model. A session is ended after the call in progress, unless the sessions use twice the limit.
        """
        live = [session for session in self._sessions if not session.lost]
        total = sum(session.memory_bytes for session in live)
        if total <= self._memory_bytes:
            return
        share, urgent = self._memory_bytes / len(live), total > 2 * self._memory_bytes
        for session in sorted(live, key=lambda session: session.memory_bytes, reverse=True):
            if total <= self._memory_bytes or session.memory_bytes <= share:
                return
            total -= session.memory_bytes
            session.evict(
                f"the session was ended: it used {session.memory_bytes >> 20} MB, the most of {len(live)} sessions "
                f"that exceeded session_memory_bytes={self._memory_bytes} together",
                FaultKind.TOOL_CRASHED,
                after_call=not urgent,
            )

    async def _monitor(self) -> None:
        """End idle sessions, and monitor the memory of all, until cancelled."""
        while True:
            await asyncio.sleep(_MONITOR_SECONDS)
            now = time.monotonic()
            for session in tuple(self._sessions):
                if not session.busy and now - session.last_used > session.limits.idle_seconds:
                    session.evict(f"the session was idle for more than idle_seconds={session.limits.idle_seconds:g}")
            await self._measure_if_full()

    async def _measure_if_full(self) -> None:
        """Measure all sessions if the whole pool exceeds their limit. Most use less than after their last call."""
        group = self._setup.group
        try:
            if group is None or group.memory_now() <= self._memory_bytes:
                return
        except OSError:  # the group was removed
            return
        for number, session in enumerate(tuple(self._sessions), 1):
            with contextlib.suppress(OSError):  # the group was removed: keep the earlier value
                session.measure()
            if number % _MEASURED_AT_ONCE == 0:
                await asyncio.sleep(0)
        self.enforce_memory()
