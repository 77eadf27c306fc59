"""How many sessions there may be, which are ended, and that nothing is left of any."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from verl_tool.errors import IsolationError, SandboxError, ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.sandbox import Level, Limits, SandboxPool, Session, SessionLimits
from verl_tool.sandbox.isolation import levels
from verl_tool.sandbox.isolation.levels import Isolation

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.timeout(60)]


def pool_of(**options: object) -> SandboxPool:
    return SandboxPool(workers=1, warm_modules=(), **options)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come about within 10 s")


async def test_one_too_many_is_overloaded_and_a_closed_one_makes_room() -> None:
    async with pool_of(max_sessions=1) as pool:
        async with pool.session():
            with pytest.raises(ToolFault, match="max_sessions") as caught:
                await pool.session().start()
            assert (caught.value.kind, caught.value.retryable) == (FaultKind.OVERLOADED, True)
            assert pool.stats().sessions == 1
        async with pool.session() as session:
            assert (await session.run("print(1)")).stdout == "1\n"
        assert pool.stats().sessions == 0


async def lost(session: Session, reason: str) -> None:
    for call in (session.run("1"), session.exec("true"), session.read_file("x"), session.write_file("x", b"")):
        with pytest.raises(ToolFault, match=reason) as caught:
            await call
        assert (caught.value.kind, caught.value.retryable) == (FaultKind.STATE_LOST, False)


async def test_idle_sessions_are_ended_and_say_so() -> None:
    async with pool_of() as pool, pool.session(limits=SessionLimits(idle_seconds=0.5)) as session:
        result = await session.run("import time; time.sleep(2)\nprint('busy is not idle')")
        assert result.stdout == "busy is not idle\n"
        await until(lambda: pool.stats().sessions == 0)
        await lost(session, "idle_seconds=0.5")


_MB_HELD = 200
_HOGS = {
    "Python": ("run", f"x = bytearray({_MB_HELD} << 20)"),
    "a cell that goes on": ("run", f"x = bytearray({_MB_HELD} << 20); import time; time.sleep(3)"),
    "a command that goes on": ("exec", f"x=$(head -c {_MB_HELD}M /dev/zero | tr '\\0' a); sleep 3"),
    "files": ("exec", f"head -c {_MB_HELD}M /dev/zero > f"),
    "shared memory": ("run", f"open('/dev/shm/f', 'wb').write(bytes({_MB_HELD} << 20))"),
    "a shared map": ("run", f"import mmap; m = mmap.mmap(-1, {_MB_HELD} << 20); m.write(bytes({_MB_HELD} << 20))"),
    "many processes": (
        "exec",
        "for i in $(seq 20); do (x=$(head -c 5M /dev/zero | tr '\\0' a); sleep 3) & done; wait",
    ),
}


async def test_memory_is_taken_from_who_holds_most_and_counts_as_its_doing() -> None:
    async with pool_of(session_memory_bytes=300 << 20) as pool:
        if pool._group is None:
            pytest.skip("control groups cannot be made here")
        limits = SessionLimits(disk_bytes=256 << 20, wall_seconds=20.0)
        small = [pool.session(limits=limits) for _ in range(6)]
        for number, session in enumerate(small):
            await session.start()
            await session.run(f"x = {number}")
        hogs = {name: pool.session(limits=limits) for name in _HOGS}
        for hog in hogs.values():
            await hog.start()
        calls = [getattr(hogs[name], method)(program) for name, (method, program) in _HOGS.items()]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: pool._group.memory_now() < 300 << 20)
        for number, session in enumerate(small):
            assert (await session.run("print(x)")).stdout == f"{number}\n"
        refused = [outcome for outcome in outcomes if isinstance(outcome, ToolFault)]
        for hog in hogs.values():
            try:
                await hog.exec("true")
            except ToolFault as fault:
                refused.append(fault)
        assert len(refused) >= len(hogs) - 1
        for fault in refused:
            assert (fault.kind, fault.kind.provokable) == (FaultKind.TOOL_CRASHED, True)
            assert "session_memory_bytes" in fault.message
        for session in (*small, *hogs.values()):
            await session.close()


async def test_the_call_that_takes_too_much_has_its_result() -> None:
    async with pool_of(session_memory_bytes=150 << 20) as pool:
        if pool._group is None:
            pytest.skip("control groups cannot be made here")
        async with pool.session() as small, pool.session() as hog:
            await small.run("x = 1")
            result = await hog.run("x = bytearray(200 << 20); import time; time.sleep(1); print('done')")
            assert result.stdout == "done\n"
            with pytest.raises(ToolFault, match="the most of 2 sessions"):
                await hog.run("1")
            assert (await small.run("print(x)")).stdout == "1\n"


@pytest.mark.parametrize(
    ("method", "program", "ending"),
    [
        ("exec", "sleep 0.5; echo done; exit 3", 3),
        (
            "run",
            "import os, time; time.sleep(0.5); print('done', flush=True); os.kill(os.getppid(), 9); time.sleep(9)",
            None,
        ),
    ],
)
async def test_a_call_that_an_eviction_waits_for_has_its_result(method: str, program: str, ending: int | None) -> None:
    async with pool_of() as pool, pool.session() as session:
        call = asyncio.create_task(getattr(session, method)(program))
        await asyncio.sleep(0.2)
        session.evict("the test evicts it", after_call=True)
        result = await call
        assert (result.stdout, result.exit_code) == ("done\n", ending)
        await lost(session, "the test evicts it")


async def test_a_pool_closes_without_the_call_that_an_eviction_waits_for() -> None:
    async with pool_of() as pool:
        session = pool.session()
        await session.__aenter__()
        call = asyncio.create_task(session.exec("sleep 60", wall_seconds=60))
        await asyncio.sleep(0.3)
        session.evict("the test evicts it", after_call=True)
        begun = time.monotonic()
    assert time.monotonic() - begun < 20.0
    with contextlib.suppress(ToolFault):
        await call


async def test_memory_that_a_program_takes_between_calls_is_counted() -> None:
    async with pool_of(session_memory_bytes=150 << 20) as pool:
        if pool._group is None:
            pytest.skip("control groups cannot be made here")
        async with pool.session() as small, pool.session() as hog:
            await small.run("x = 1")
            null = os.open(os.devnull, os.O_RDWR)
            later = "sleep 1; x=$(head -c 200M /dev/zero | tr '\\0' a); sleep 60"
            await hog.spawn(later, streams=(null, null, null))
            os.close(null)
            await until(lambda: hog.lost)
            assert (await small.run("print(x)")).stdout == "1\n"


async def test_no_session_is_ended_for_what_it_held_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool_of(session_memory_bytes=150 << 20) as pool:
        if pool._group is None:
            pytest.skip("control groups cannot be made here")
        async with pool.session() as hog, pool.session() as small:
            await small.run("x = 1")
            await hog.run("x = bytearray(100 << 20)")
            # Both are measured anew once the pool holds more than they may.
            small.memory_bytes, hog.memory_bytes = 1 << 30, 0
            monkeypatch.setattr(pool._group, "memory_now", lambda: 1 << 30)
            await until(lambda: hog.memory_bytes > 0 or small.lost)
            assert not small.lost
            assert not hog.lost


async def test_the_death_of_the_forkserver_is_a_fault_and_others_take_over() -> None:
    async with pool_of() as pool, pool.session() as session:
        call = asyncio.create_task(session.run("import time; time.sleep(30)"))
        await asyncio.sleep(0.3)
        assert session._worker is not None
        assert session._worker.pid is not None
        os.killpg(session._worker.pid, signal.SIGKILL)
        with pytest.raises(ToolFault, match="forkserver of the session died") as caught:
            await call
        assert caught.value.kind is FaultKind.STATE_LOST
        await lost(session, "forkserver of the session died")
        async with pool.session() as other:
            assert (await other.run("print(1)")).stdout == "1\n"


async def test_a_pool_without_sessions_holds_few_descriptors() -> None:
    async with pool_of() as pool:
        before = len(os.listdir("/proc/self/fd"))
        sessions = [pool.session() for _ in range(30)]
        for session in sessions:
            await session.start()
        await asyncio.gather(*(session.run("1") for session in sessions))
        await asyncio.gather(*(session.close() for session in sessions))
        assert len(os.listdir("/proc/self/fd")) < before + 80
        async with pool.session() as session:
            assert (await session.run("print(1)")).stdout == "1\n"


async def test_nothing_is_left_of_closed_sessions() -> None:
    async with pool_of() as pool:
        async with pool.session() as session:
            await session.run("1")
            assert session._worker is not None
            server = psutil.Process(session._worker.pid)
            before = len(server.children(recursive=True))
        await until(lambda: len(server.children(recursive=True)) < before)
        processes, files = len(server.children(recursive=True)), len(os.listdir("/proc/self/fd"))
        sessions = [pool.session(limits=SessionLimits(wall_seconds=20)) for _ in range(8)]
        await asyncio.gather(*(session.start() for session in sessions))
        calls = [asyncio.create_task(session.run("import time; time.sleep(30)")) for session in sessions[:3]]
        calls += [asyncio.create_task(session.exec("sleep 30 & setsid sleep 30")) for session in sessions[3:5]]
        await asyncio.sleep(0.3)
        await asyncio.gather(*(session.close() for session in sessions))
        for call in calls:
            with pytest.raises((ToolFault, SandboxError)):
                await call
        assert len(server.children(recursive=True)) == processes
        forkserver = server.children(recursive=True)[-1]
        assert forkserver.num_fds() < 20
        assert len(os.listdir("/proc/self/fd")) - files < 12 * 8


async def test_what_a_session_may_open_does_not_depend_on_how_many_others_there_are() -> None:
    limits = SessionLimits(open_files=24)
    opens = "files = [open('a.txt') for _ in range(8)]; print(len(files))"
    async with pool_of() as pool, contextlib.AsyncExitStack() as sessions:
        for number in range(16):
            session = await sessions.enter_async_context(pool.session(limits=limits, files={"a.txt": b"a"}))
            assert (await session.run(opens)).stdout == "8\n", number
        # The first command of a session, and a run, are forked beside the files of all sessions too.
        assert (await session.exec("cat a.txt")).stdout == "a"
        many = await session.run("files += [open('a.txt') for _ in range(24)]")
        assert "Too many open files" in many.stderr


async def test_runs_go_on_beside_sessions() -> None:
    async with pool_of(max_concurrent=2) as pool, pool.session() as session, pool.session():
        results = await asyncio.gather(
            *(pool.run("print(1)", limits=Limits()) for _ in range(4)), session.run("print(2)")
        )
        assert [result.stdout for result in results] == ["1\n"] * 4 + ["2\n"]


async def test_a_pool_for_sessions_starts_forkservers_for_runs_with_the_first_run() -> None:
    async with pool_of(for_sessions=True, max_sessions=1) as pool, pool.session() as session:
        await pool.check()
        assert (await session.run("print(1)")).stdout == "1\n"
        assert pool.stats().workers == 0
        runs = await asyncio.gather(*(pool.run("print(2)") for _ in range(3)))
        assert [run.stdout for run in runs] == ["2\n"] * 3
        assert pool.stats().workers == 1


async def test_without_isolation_there_are_no_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "strongest", lambda: Isolation(Level.none, missing="for the test"))
    async with pool_of(required_level=Level.none) as pool:
        with pytest.raises(IsolationError, match="sessions need the isolation level 'full'"):
            pool.session()
    with pytest.raises(IsolationError, match="sessions need the isolation level 'full'"):
        await pool_of(required_level=Level.none, for_sessions=True).start()


async def test_a_pool_that_is_not_running_gives_no_session() -> None:
    with pytest.raises(SandboxError, match="not running"):
        pool_of().session()
