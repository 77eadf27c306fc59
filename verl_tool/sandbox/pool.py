"""The sandbox pool, which distributes runs over warm forkservers."""

from __future__ import annotations

import asyncio
import compileall
import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

from verl_tool.errors import ConfigError, IsolationError, SandboxError
from verl_tool.sandbox import oom_kills
from verl_tool.sandbox.inside import wire
from verl_tool.sandbox.isolation import bubblewrap
from verl_tool.sandbox.isolation import interpreter as interpreters
from verl_tool.sandbox.isolation import levels as isolations
from verl_tool.sandbox.isolation.cgroup import ControlGroup, RunGroup, group_bytes
from verl_tool.sandbox.isolation.levels import Isolation, Level
from verl_tool.sandbox.job import JobFiles, check_names, encode, fetch
from verl_tool.sandbox.limit_enforcer import LimitEnforcer
from verl_tool.sandbox.limits import Limits, SessionLimits
from verl_tool.sandbox.policy import Policy
from verl_tool.sandbox.result import RunResult
from verl_tool.sandbox.run_queue import RunSlots
from verl_tool.sandbox.session import Session
from verl_tool.sandbox.session.pool import SessionPool
from verl_tool.sandbox.warm_modules import WARM_MODULES, Tier, choose_tier, tiers_of
from verl_tool.sandbox.worker import MAX_SLOTS, START_SECONDS, RunStatus, Worker, WorkerExitedError, WorkerSetup

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_PAUSE_SECONDS = 0.05
_SHORT_PER_CORE, _MAX_PER_CORE = 4, 16
_QUARANTINES = 2
"""Maximum number of forkservers that run a single program each."""
_SPARE_SLOTS = 8
"""Slots for runs that were cancelled and have not exited yet."""
_FILES_PER_RUN = 12
"""Descriptors of the job, the streams, the folder, and the files of the control group."""
_FILES_PER_SESSION = 4
_OTHER_FILES = 2048
_ANSWER_SECONDS = 20.0
"""Time for a forkserver on an overloaded machine to end a run at its limit, and to report it."""
_LONGEST_PAUSE_SECONDS = 30.0
_CHECK_SECONDS = 10.0
_NO_FILES: Mapping[str, bytes] = MappingProxyType({})


@dataclass(frozen=True)
class PoolStats:
    """Counts of a pool."""

    workers: int
    """Forkservers that accept runs."""
    live: int
    queued: int
    slots: int
    restarts: int
    """Forkservers that died and were replaced."""
    finished: int
    sessions: int


class SandboxPool:
    """Runs untrusted Python code, many at a time.

        async with SandboxPool() as pool:
            result = await pool.run("print(1 + 1)")

    Every run starts from the same warm interpreter and leaves nothing behind. A pool belongs to the event loop that
    enters it.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        limits: Limits | None = None,
        policy: Policy | None = None,
        required_level: Level | str = Level.full,
        warm_modules: Sequence[str] = WARM_MODULES,
        max_concurrent: int | None = None,
        max_queued: int = 20_000,
        max_sessions: int = 256,
        session_memory_bytes: int | None = None,
        for_sessions: bool = False,
        interpreter: str = sys.executable,
    ) -> None:
        """Store the settings. `start` starts the forkservers.

        Args:
            workers: number of forkservers of each kind (see `warm_modules`), one per core by default.
            limits: default limits of runs.
            policy: rules in addition to the isolation.
            required_level: minimum level of isolation, below which the pool does not start. The strongest level that
                works is used.
            warm_modules: modules to import before the first run. Those that are not installed are skipped. Each makes a
                fork slower, so there are up to five kinds of forkservers (`warm_modules.tiers_of`). A run is started by
                the smallest one that contains what it appears to import; it can import anything from any of them.
            max_concurrent: maximum number of runs at the same time, 16 per core by default. At most four per core are
                younger than a second, since young runs compete for the cores.
            max_queued: maximum number of waiting runs. Further ones are rejected.
            max_sessions: maximum number of sessions. Further ones get the fault ``overloaded``.
            session_memory_bytes: maximum memory of all sessions together, by default a third of the machine's. Beyond
                it, the largest sessions are ended. Enforced with control groups only.
            for_sessions: `start` warms a forkserver for sessions, and the first run starts those for runs. By default
                it is the other way round.
            interpreter: Python interpreter that runs the code, whose installed packages can be imported.
        """
        cores = len(os.sched_getaffinity(0))
        self._workers_requested = workers or cores
        self.limits = limits or Limits()
        """Default limits of runs."""
        self._policy = policy or Policy()
        self._required = Level.parse(required_level)
        self._tiers = tiers_of(warm_modules, self._policy.pre_imported_modules)
        self._modules_by_tier: dict[Tier, frozenset[str]] = {}
        """Top-level names of the modules in the forkservers of each tier."""
        maximum = min(max(max_concurrent or _MAX_PER_CORE * cores, 1), MAX_SLOTS - _SPARE_SLOTS)
        self._run_slots = RunSlots(_SHORT_PER_CORE * cores, maximum, max_queued)
        self._max_sessions = max_sessions
        self._session_memory = session_memory_bytes or _memory_ceiling() // 3
        self._sessions: SessionPool | None = None
        self._for_sessions = for_sessions
        self._interpreter = interpreter
        self._isolation: Isolation | None = None
        self._group: ControlGroup | None = None
        self._setups: list[WorkerSetup] = []
        """Settings of the forkservers for runs."""
        self._workers: list[Worker] = []
        """Forkservers for runs, empty before they are started."""
        self._starting = asyncio.Lock()
        self._replacements: set[asyncio.Task[None]] = set()
        self._fair_share = _memory_ceiling() // maximum
        self._quarantine = asyncio.Semaphore(_QUARANTINES)
        self._enforcer = LimitEnforcer()
        self._watch: asyncio.Task[None] | None = None
        self._restarts = 0
        self._finished = 0
        self._closed = False

    @property
    def level(self) -> Isolation:
        """The isolation in use. Raises SandboxError if the pool has not started."""
        if self._isolation is None:
            raise SandboxError("the pool has not started", retryable=False)
        return self._isolation

    async def __aenter__(self) -> SandboxPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Determine the isolation and start the forkservers.

        Raises IsolationError if the required level is not available on this machine.
        """
        _allow_open_files(
            _OTHER_FILES + _FILES_PER_RUN * self._run_slots.maximum + _FILES_PER_SESSION * self._max_sessions
        )
        found = await asyncio.to_thread(isolations.strongest)
        self._isolation = isolations.require(found, self._required)
        self._group = await asyncio.to_thread(ControlGroup.create, _memory_ceiling())
        await asyncio.to_thread(_compile_forkserver)
        setup = WorkerSetup(
            interpreter=await asyncio.to_thread(interpreters.inspect, self._interpreter),
            isolation=self._isolation,
            policy=self._policy,
            modules=(),
            slots=self._run_slots.maximum + _SPARE_SLOTS,  # all runs may be in the same worker
            group=self._group,
        )
        self._setups = [replace(setup, modules=tier) for tier in self._tiers for _ in range(self._workers_requested)]
        sessions = SessionPool(
            self._setups[-1],
            self._run_slots,
            self._enforcer,
            workers=self._workers_requested,
            most=self._max_sessions,
            memory_bytes=self._session_memory,
            fair_share=self._fair_share,
        )
        try:
            await (sessions.warm() if self._for_sessions else self._start_workers())
        except BaseException:
            await self._remove_group()
            raise
        self._sessions = sessions
        if self._group is not None:
            self._watch = asyncio.get_running_loop().create_task(self._enforcer.watch())

    async def _start_workers(self) -> None:
        """Start the forkservers for runs. Raises IsolationError, SandboxError."""
        async with self._starting:
            if self._workers:
                return
            workers = [Worker(each, self._replace) for each in self._setups]
            try:
                await asyncio.gather(*(worker.start() for worker in workers))
                if self._closed:
                    raise SandboxError("the pool was closed", retryable=True)
            except BaseException:
                await asyncio.gather(*(worker.close() for worker in workers), return_exceptions=True)
                raise
            self._workers = workers
            self._modules_by_tier = {worker.setup.modules: worker.modules for worker in workers}

    async def close(self) -> None:
        """End all runs and forkservers. Waiting and running calls of `run` raise SandboxError."""
        self._closed = True
        if self._sessions is not None:
            await self._sessions.close()
        tasks = [*self._replacements, *([self._watch] if self._watch is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._run_slots.close(SandboxError("the pool was closed", retryable=True))
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers = []
        await self._remove_group()

    async def _remove_group(self) -> None:
        if self._group is not None:
            await asyncio.to_thread(self._group.remove)

    def stats(self) -> PoolStats:
        return PoolStats(
            workers=sum(worker.alive for worker in self._workers),
            live=self._run_slots.live,
            queued=self._run_slots.queued,
            slots=self._run_slots.maximum,
            restarts=self._restarts,
            finished=self._finished,
            sessions=self._sessions.live if self._sessions is not None else 0,
        )

    async def check(self) -> None:
        """Run a small program. Raises SandboxError if that fails."""
        self._require_running()
        assert self._sessions is not None
        program = self.run("print(6 * 7)") if self._workers else self._sessions.run_isolated("print(6 * 7)")
        try:
            result = await asyncio.wait_for(program, _CHECK_SECONDS)
        except asyncio.TimeoutError as error:
            raise SandboxError(f"no answer from the sandbox within {_CHECK_SECONDS:g} s") from error
        if result.stdout != "42\n":
            raise SandboxError(f"the sandbox answered {result.output[:200]!r} to print(6 * 7)")

    def session(self, *, limits: SessionLimits | None = None, files: Mapping[str, bytes] = _NO_FILES) -> Session:
        """Make a session: Python state, files and programs of one trajectory, with all warm modules and the policy.

        Start it with `start`, or use it as a context manager. `limits` default to those of the pool, and to
        `SessionLimits` for the other fields. `files` (content by path) are written to its folder first.

        Raises ConfigError if a file name would leave the folder or the files exceed the disk limit, IsolationError if
        the isolation is ``none``, and SandboxError if the pool is not running.
        """
        self._require_running()
        assert self._sessions is not None
        return self._sessions.new(limits or SessionLimits(**asdict(self.limits)), files)

    async def run(
        self,
        code: str | bytes,
        *,
        stdin: str | bytes = "",
        files: Mapping[str, bytes] = _NO_FILES,
        fetch_files: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> RunResult:
        """Run a Python program until it ends or hits a limit. Cancelling kills it.

        `stdin` is empty by default, so that `input()` raises EOFError. `files` (content by path) are written to the
        run's folder first, and those of `fetch_files` that exist at the end are returned. `limits` override the pool's.

        Raises ConfigError if a file name would leave the folder, or code and files exceed the disk limit, and
        SandboxError if the sandbox failed or its queue is full; it is `retryable` only if the code certainly did not
        run.
        """
        limits = limits or self.limits
        check_names(files, fetch_files)
        source, text = encode(code), encode(stdin)
        _check_size(len(source) + sum(map(len, files.values())), limits)
        self._require_running()
        if not self._workers:
            try:
                await self._start_workers()
            except IsolationError as error:
                raise SandboxError(str(error), retryable=True) from error
        slot = await self._run_slots.enter()
        try:
            tier = choose_tier((source, *files.values()), self._modules_by_tier)
            return await self._attempt(lambda: JobFiles(source, text, files), tier, limits, fetch_files)
        except OSError as error:
            raise SandboxError(f"no memory or file descriptors for a run: {error}") from error
        finally:
            self._run_slots.leave(slot)

    def _require_running(self) -> None:
        if self._closed or self._sessions is None:
            raise SandboxError("the pool is not running", retryable=True)

    async def _attempt(
        self, new_job: Callable[[], JobFiles], tier: Tier, limits: Limits, fetch_files: Sequence[str]
    ) -> RunResult:
        """Run the job, and repeat it after a failure of the sandbox if that has no side effects."""
        for attempt in range(1, _ATTEMPTS + 1):
            job = new_job()
            try:
                async with self._worker(tier, alone=attempt == _ATTEMPTS) as worker:
                    return await self._run_once(worker, job, limits, fetch_files)
            except SandboxError as error:
                untouched = error.retryable or job.state() == wire.NOT_STARTED
                if self._closed or not (untouched or self._leaves_nothing(error)):
                    raise SandboxError(str(error), retryable=untouched) from error
                if attempt == _ATTEMPTS:
                    if isinstance(error, WorkerExitedError) and not untouched:
                        return _broke_its_sandbox(job, limits)
                    raise SandboxError(str(error), retryable=untouched) from error
            finally:
                job.close()
            await asyncio.sleep(_PAUSE_SECONDS * attempt)
        raise AssertionError("unreachable")

    def _leaves_nothing(self, error: SandboxError) -> bool:
        """Return whether a run that had started may be repeated: an isolated run and its files end with its worker."""
        return (
            isinstance(error, (WorkerExitedError, oom_kills.CollateralOomError)) and self.level.level is not Level.none
        )

    @contextlib.asynccontextmanager
    async def _worker(self, tier: Tier, *, alone: bool) -> AsyncIterator[Worker]:
        """Provide a worker for a run. With `alone`, start one that no other run can break."""
        if not alone:
            yield await self._pick(tier)
            return
        async with self._quarantine:
            setup = next(worker.setup for worker in self._workers if worker.setup.modules == tier)
            worker = Worker(setup, lambda _: None)
            try:
                await worker.start()
                yield worker
            except IsolationError as error:
                raise SandboxError(str(error), retryable=True) from error
            finally:
                await worker.close()

    async def _pick(self, tier: Tier) -> Worker:
        """Return the live worker of `tier`, or else of any tier, with the fewest runs.

        Waits while all workers are being replaced. Raises SandboxError if none starts.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            alive = [worker for worker in self._workers if worker.alive]
            if alive:
                return min(alive, key=lambda worker: (worker.setup.modules != tier, worker.live))
            if not self._replacements or time.monotonic() > deadline:
                raise SandboxError("all forkservers exited, and no replacement could be started", retryable=True)
            await asyncio.wait(self._replacements, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)

    async def _run_once(self, worker: Worker, job: JobFiles, limits: Limits, fetch_files: Sequence[str]) -> RunResult:
        if self._group is None:
            kills = oom_kills.machine_kills()
            finished = await self._let_run(worker, job, limits, bool(fetch_files), None)
            with _closing(finished.folder_fd):
                finished = oom_kills.judge_without_group(finished, kills, self._fair_share)
                return self._result(job, finished, limits, fetch_files)
        group = self._group.take(group_bytes(worker.resident_bytes, limits))
        finished = await self._let_run(worker, job, limits, bool(fetch_files), group)
        with _closing(finished.folder_fd):
            try:
                finished = oom_kills.judge_by_group(finished, group, self._fair_share)
            finally:
                self._group.give(group, gone=finished.gone)
            return self._result(job, finished, limits, fetch_files)

    async def _let_run(
        self, worker: Worker, job: JobFiles, limits: Limits, fetch_files: bool, group: RunGroup | None
    ) -> RunStatus:
        try:
            run_id, future = worker.begin(job, limits, fetch_files, group)
        except BaseException:
            self._give(group, gone=True)
            raise
        max_wait_seconds = limits.wall_seconds + _ANSWER_SECONDS
        timer = asyncio.get_running_loop().call_later(max_wait_seconds, _give_up, worker)  # its death ends the future
        try:
            with self._enforce_limits(group, limits, lambda why: worker.kill(run_id, why)):
                return await asyncio.shield(future)
        except asyncio.CancelledError:
            worker.kill(run_id)
            await asyncio.wait({future}, timeout=_ANSWER_SECONDS)
            exited = False
            if future.done() and future.exception() is None:
                finished = future.result()
                with _closing(finished.folder_fd):
                    exited = finished.gone
            self._give(group, gone=exited)
            raise
        except SandboxError:
            self._give(group, gone=False)
            raise
        finally:
            timer.cancel()

    def _give(self, group: RunGroup | None, *, gone: bool) -> None:
        """Return a control group to the pool's, if there are groups. The arguments are those of `ControlGroup.give`."""
        if self._group is not None and group is not None:
            self._group.give(group, gone=gone)

    def _enforce_limits(
        self, group: RunGroup | None, limits: Limits, kill: Callable[[int], None]
    ) -> contextlib.AbstractContextManager[None]:
        """Enforce the limits within the block. Without control groups, the forkserver does so."""
        if group is None:
            return contextlib.nullcontext()
        return self._enforcer.enforced(group, limits, kill)

    def _result(self, job: JobFiles, ended: RunStatus, limits: Limits, fetch_files: Sequence[str]) -> RunResult:
        if not ended.reached and ended.limit_hit is None:
            if job.state() == wire.FILES_REJECTED:
                raise ConfigError(f"the files of a run cannot be laid out: {job.failure()}")
            raise SandboxError(f"a run could not be set up: {job.failure()}", retryable=True)
        killed_by = os.WTERMSIG(ended.status) if os.WIFSIGNALED(ended.status) else None
        self._finished += 1
        return job.result(
            limits,
            exit_code=None if killed_by else os.WEXITSTATUS(ended.status),
            killed_by=killed_by,
            limit_hit=_limit_hit(ended, killed_by),
            wall_seconds=ended.wall_seconds,
            cpu_seconds=ended.cpu_seconds,
            peak_memory_bytes=ended.peak_memory_bytes,
            files=fetch(ended.folder_fd, fetch_files, limits.disk_bytes) if ended.folder_fd >= 0 else {},
        )

    def _replace(self, dead: Worker) -> None:
        """Reap a worker that died, and start a replacement."""
        if self._closed:
            return
        task = asyncio.get_running_loop().create_task(self._restart(dead))
        self._replacements.add(task)
        task.add_done_callback(self._replacements.discard)

    async def _restart(self, dead: Worker) -> None:
        await dead.close()
        pause = _PAUSE_SECONDS
        while True:
            fresh = Worker(dead.setup, self._replace)
            try:
                await fresh.start()
                break
            except (SandboxError, IsolationError, OSError) as error:
                logger.error("a forkserver could not be restarted, next try in %g s: %s", pause, error)
                await fresh.close()
            except asyncio.CancelledError:
                await fresh.close()
                raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._restarts += 1
        self._workers = [fresh if worker is dead else worker for worker in self._workers]


def _allow_open_files(count: int) -> None:
    """Raise the soft limit of open files of this process to `count`, or to the hard limit."""
    soft, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = count if maximum == resource.RLIM_INFINITY else min(count, maximum)
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, maximum))


def _compile_forkserver() -> None:
    """Compile the source of the forkserver, if its folder is writable.

    A forkserver cannot write there, and compiling its source itself would increase its memory and slow down forks.
    """
    compileall.compile_dir(bubblewrap.INSIDE, quiet=2)


def _give_up(worker: Worker) -> None:
    logger.error("a forkserver (pid %s) does not answer; it is killed and replaced", worker.pid)
    worker.abandon()


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _broke_its_sandbox(job: JobFiles, limits: Limits) -> RunResult:
    """Return the result of a run whose forkservers all died, also the one that it had for itself."""
    return job.result(limits, exit_code=None, killed_by=signal.SIGKILL, limit_hit="sandbox")


def _check_size(size: int, limits: Limits) -> None:
    if size > limits.disk_bytes:
        raise ConfigError(f"code and files are {size} bytes, the limit disk_bytes is {limits.disk_bytes}; raise it")


def _limit_hit(ended: RunStatus, killed_by: int | None) -> str | None:
    if ended.limit_hit is None and killed_by == signal.SIGXCPU:
        return "cpu_seconds"
    return ended.limit_hit


def _memory_ceiling() -> int:
    """Return the memory for all runs of a pool together in bytes: nine tenths of the machine's."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 9 // 10
